#include "comm/cpu_timer.h"

#include <ctime>
#include <utility>

namespace hybridcp {

namespace {

double cpu_seconds(CpuClock clock) {
    timespec time{};
    ::clock_gettime(
        clock == CpuClock::kProcess ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace

CpuTimer::CpuTimer(Recorder& recorder, std::string op)
    : recorder_(recorder), op_(std::move(op)), start_(cpu_seconds(recorder.cpu_clock())) {}

CpuTimer::~CpuTimer() {
    recorder_.add_cpu_seconds(op_, cpu_seconds(recorder_.cpu_clock()) - start_);
}

}  // namespace hybridcp
