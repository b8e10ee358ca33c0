#include "simt/order.h"

#include <algorithm>

namespace hybridcp::simt {
namespace {

void raise(Times& times, const Times& to) {
    for (std::size_t i = 0; i < times.size(); ++i) {
        times[i] = std::max(times[i], to[i]);
    }
}

}  // namespace

void Channel::release(Clock& clock) {
    if (clock.others != nullptr && clock.others != last_released_) {
        raise(collected_, *clock.others);
        last_released_ = clock.others;
    }
    release(clock.id, clock.time);
    ++clock.time;
    clock.touched = false;
}

void Channel::release(uint32_t id, uint32_t time) {
    collected_[id] = std::max(collected_[id], time);
}

void Channel::acquire(Clock& clock) {
    if (published_ == nullptr || clock.others == published_) {
        return;
    }
    if (clock.others == nullptr) {
        clock.others = published_;
        return;
    }
    if (clock.others != last_known_ || published_ != last_published_) {
        auto result = std::make_shared<Times>(*published_);
        raise(*result, *clock.others);
        last_known_ = clock.others;
        last_published_ = published_;
        last_result_ = std::move(result);
    }
    clock.others = last_result_;
}

}  // namespace hybridcp::simt
