// Compiled without any -m flag, like cpu.cpp.
#include "dispatch.h"

#include <sstream>
#include <stdexcept>

#include "cpu.h"

#define LK_ROW(name, needs) extern const lk::Kernels lk_kernels_##name;
#include "isas.inc"
#undef LK_ROW

namespace lk {
namespace {

IsaInfo row(const Kernels& kernels, const char* needs) {
  IsaInfo info{&kernels, {}};
  std::istringstream words(needs);
  for (std::string feature; words >> feature;)
    if (!cpu_has(feature)) info.missing.push_back(feature);
  return info;
}

std::string supported() {
  std::string names;
  for (const auto& isa : isas())
    if (isa.missing.empty()) names += (names.empty() ? "" : ", ") + std::string(isa.kernels->name);
  return names;
}

}  // namespace

const std::vector<IsaInfo>& isas() {
  static const std::vector<IsaInfo> all = {
#define LK_ROW(name, needs) row(lk_kernels_##name, needs),
#include "isas.inc"
#undef LK_ROW
  };
  return all;
}

const Kernels& select_isa(const std::string& name) {
  const Kernels* best = nullptr;
  for (const auto& isa : isas()) {
    if (name.empty()) {
      if (isa.missing.empty()) best = isa.kernels;
    } else if (name == isa.kernels->name) {
      if (isa.missing.empty()) return *isa.kernels;
      std::string lacks;
      for (const auto& feature : isa.missing) lacks += (lacks.empty() ? "" : ", ") + feature;
      throw std::invalid_argument("instruction set " + name + " is not supported by this processor (it lacks " + lacks +
                                  "); supported are " + supported());
    }
  }
  if (best) return *best;
  throw std::invalid_argument("unknown instruction set " + name + "; supported are " + supported());
}

}  // namespace lk
