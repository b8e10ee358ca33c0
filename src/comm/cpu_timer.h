// Adds the CPU time of a scope to an op's record: what an exchange costs in packing, copying and
// transfers, where ranks share cores and elapsed time says little.
#pragma once

#include <string>

#include "hybridcp/group.h"

namespace hybridcp {

class CpuTimer {
  public:
    CpuTimer(Recorder& recorder, std::string op);
    ~CpuTimer();
    CpuTimer(const CpuTimer&) = delete;
    CpuTimer& operator=(const CpuTimer&) = delete;

  private:
    Recorder& recorder_;
    std::string op_;
    double start_ = 0.0;
};

}  // namespace hybridcp
