// What a Group's exchanges moved and how long they took, per op name.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace hybridcp {

/// What one op name has moved since the last reset. Messages and bytes are those that this rank
/// sends; a collective counts one message, and the bytes that its ideal algorithm sends
/// (docs/modes.md).
struct OpTraffic {
    std::int64_t messages = 0;
    std::int64_t bytes = 0;
    double seconds = 0.0;      // spent waiting
    double cpu_seconds = 0.0;  // of packing, unpacking and transfers, where an op measures them
};

/// Whose CPU time an op's cpu_seconds are: of the whole process (one rank a process; libtorch's
/// transfer threads count too), or of the calling thread (ranks that share a process).
enum class CpuClock { kThread, kProcess };

class Recorder {
  public:
    void add(const std::string& op, std::int64_t messages, std::int64_t bytes);
    void add_seconds(const std::string& op, double seconds);
    void add_cpu_seconds(const std::string& op, double seconds);
    [[nodiscard]] CpuClock cpu_clock() const { return cpu_clock_; }
    void set_cpu_clock(CpuClock clock) { cpu_clock_ = clock; }
    /// Counts `part` of `whole` things under a name, such as heads that forget their start.
    void add_share(const std::string& name, std::int64_t part, std::int64_t whole);
    /// The share since the last reset; nothing when none was counted.
    [[nodiscard]] std::optional<double> share(const std::string& name) const;
    void reset() {
        traffic_.clear();
        shares_.clear();
    }
    [[nodiscard]] const std::map<std::string, OpTraffic>& traffic() const { return traffic_; }
    [[nodiscard]] OpTraffic of(const std::string& op) const;

  private:
    std::map<std::string, OpTraffic> traffic_;
    std::map<std::string, std::pair<std::int64_t, std::int64_t>> shares_;
    CpuClock cpu_clock_ = CpuClock::kThread;
};

}  // namespace hybridcp
