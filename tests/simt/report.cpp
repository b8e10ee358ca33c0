// Messages: who does what where, and the list of waits when nothing can go on.

#include <fmt/format.h>

#include "simt/engine.h"

namespace hybridcp::simt {
namespace {

std::string lanes_text(uint32_t lanes) {
    std::string text;
    for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
        if ((lanes >> lane & 1) == 0) {
            continue;
        }
        uint32_t last = lane;
        while (last + 1 < kWarpThreads && (lanes >> (last + 1) & 1) != 0) {
            ++last;
        }
        text += text.empty() ? "" : ",";
        text += last == lane ? fmt::format("{}", lane) : fmt::format("{}-{}", lane, last);
        lane = last;
    }
    return text;
}

std::string state_text(const Thread& thread) {
    if (thread.exited) {
        return "exited";
    }
    if (thread.waits_for == nullptr) {
        return "can run, last in " + site_text(thread.origin);
    }
    return fmt::format("{} ({})", site_text(thread.origin),
                       thread.waits_for->describe(thread.parity));
}

}  // namespace

std::string shared_text(uint32_t offset) {
    return fmt::format("{:#x} (base + {})", offset + kSharedStart, offset);
}

std::string thread_text(const Thread& thread) {
    return fmt::format("block {} warp {} lane {}", thread.block->index, thread.warp->index,
                       thread.index % kWarpThreads);
}

namespace {
// Without arguments, which fill a line in templates.
std::string function_text(const std::source_location& site) {
    const std::string name = site.function_name();
    const std::string lambda = name.find("lambda") == std::string::npos ? "" : ", a lambda";
    return name.substr(0, name.find_first_of("([")) + lambda;
}

}  // namespace

std::string site_text(const Origin& origin) {
    std::string file = origin.site.file_name();
    file = file.substr(file.find_last_of('/') + 1);
    return fmt::format("{} at {}:{} in {}", origin.operation, file, origin.site.line(),
                       function_text(origin.site));
}

void fault(const Origin& origin, const std::string& what) {
    throw Fault(fmt::format("{}: {} {}", thread_text(*origin.thread), site_text(origin), what));
}

std::string Engine::no_progress(const std::string& why) const {
    std::string text = why + ":\n";
    for (const Warp* warp : warps_) {
        uint32_t left = 0xffffffffU;
        for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
            if ((left >> lane & 1) == 0) {
                continue;
            }
            const std::string state = state_text(*warp->lanes[lane]);
            uint32_t same = 0;
            for (uint32_t other = lane; other < kWarpThreads; ++other) {
                same |= static_cast<uint32_t>(state_text(*warp->lanes[other]) == state) << other;
            }
            left &= ~same;
            text += fmt::format("  block {} warp {} lanes {}: {}\n", warp->block->index,
                                warp->index, lanes_text(same), state);
        }
    }
    return text;
}

}  // namespace hybridcp::simt
