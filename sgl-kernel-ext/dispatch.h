// Which kernel table runs: the last row of CMakeLists.txt that this machine supports, or the one asked for.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace lk {

struct IsaInfo {
  const Kernels* kernels;
  std::vector<std::string> missing;  // features the machine lacks; empty: supported
};

const std::vector<IsaInfo>& isas();  // ascending preference

// Empty name: the best supported. Throws std::invalid_argument for an unknown or unsupported one.
const Kernels& select_isa(const std::string& name);

}  // namespace lk
