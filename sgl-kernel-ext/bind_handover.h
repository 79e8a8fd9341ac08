// Python's view of the hand-over, and where its arguments are checked.
#pragma once

#include <nanobind/nanobind.h>

namespace lk {

void bind_handover(nanobind::module_& m);

}  // namespace lk
