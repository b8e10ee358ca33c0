// Every failure of the library is one of these types; main() turns them into one line and an exit
// status. A message says what is wrong, where, and how to put it right. The library never prints
// and never exits.
#pragma once

#include <fmt/format.h>

#include <source_location>
#include <stdexcept>
#include <string>

namespace hybridcp {

enum class ErrorKind {
    kUsage,     // the request was wrong: configuration, arguments, shapes
    kFormat,    // a file is not what it should be: missing, truncated, of the wrong shape
    kComm,      // a peer failed, or a wait timed out
    kDevice,    // a device is absent or failed
    kNumerics,  // a value is not finite
    kCheck,     // a verification did not hold, or an invariant of ours broke
};

class Error : public std::runtime_error {
  public:
    Error(ErrorKind kind, const std::string& message, std::source_location where);
    [[nodiscard]] ErrorKind kind() const { return kind_; }
    [[nodiscard]] const std::source_location& where() const { return where_; }
    /// 2 when the request or an input file was wrong, 1 when a run or a check failed.
    [[nodiscard]] int exit_status() const;

  private:
    ErrorKind kind_;
    std::source_location where_;
};

#define HCP_DEFINE_ERROR(Name, kind)                                                \
    class Name : public Error {                                                     \
      public:                                                                       \
        explicit Name(const std::string& message,                                   \
                      std::source_location where = std::source_location::current()) \
            : Error(kind, message, where) {}                                        \
    }
HCP_DEFINE_ERROR(UsageError, ErrorKind::kUsage);
HCP_DEFINE_ERROR(FormatError, ErrorKind::kFormat);
HCP_DEFINE_ERROR(CommError, ErrorKind::kComm);
HCP_DEFINE_ERROR(DeviceError, ErrorKind::kDevice);
HCP_DEFINE_ERROR(NumericsError, ErrorKind::kNumerics);
HCP_DEFINE_ERROR(CheckError, ErrorKind::kCheck);
#undef HCP_DEFINE_ERROR

namespace detail {
[[noreturn]] void fail_check(const char* expression,
                             const std::string& values,
                             const std::string& hint,
                             std::source_location where);
template <typename A, typename B>
std::string both_values(const A& a, const B& b) {
    return fmt::format("{} against {}", a, b);
}
}  // namespace detail

/// The one of `known` that is closest to `word` by edit distance; for "unknown key X, did you mean
/// Y".
template <typename Range>
[[nodiscard]] std::string nearest_word(const std::string& word, const Range& known);
[[nodiscard]] std::size_t edit_distance(const std::string& a, const std::string& b);

template <typename Range>
std::string nearest_word(const std::string& word, const Range& known) {
    std::string best;
    std::size_t best_distance = static_cast<std::size_t>(-1);
    for (const auto& candidate : known) {
        const std::size_t distance = edit_distance(word, std::string(candidate));
        if (distance < best_distance) {
            best_distance = distance;
            best = std::string(candidate);
        }
    }
    return best;
}

}  // namespace hybridcp

// Invariants and argument checks. The trailing arguments are a fmt message that says what to
// change.
#define HCP_CHECK(condition, ...)                                                      \
    do {                                                                               \
        if (!(condition)) {                                                            \
            ::hybridcp::detail::fail_check(#condition, "", ::fmt::format(__VA_ARGS__), \
                                           ::std::source_location::current());         \
        }                                                                              \
    } while (false)
#define HCP_CHECK_COMPARE_(a, op, b, ...)                                           \
    do {                                                                            \
        const auto hcp_a_ = (a);                                                    \
        const auto hcp_b_ = (b);                                                    \
        if (!(hcp_a_ op hcp_b_)) {                                                  \
            ::hybridcp::detail::fail_check(                                         \
                #a " " #op " " #b, ::hybridcp::detail::both_values(hcp_a_, hcp_b_), \
                ::fmt::format(__VA_ARGS__), ::std::source_location::current());     \
        }                                                                           \
    } while (false)
#define HCP_CHECK_EQ(a, b, ...) HCP_CHECK_COMPARE_(a, ==, b, __VA_ARGS__)
#define HCP_CHECK_GE(a, b, ...) HCP_CHECK_COMPARE_(a, >=, b, __VA_ARGS__)
#define HCP_CHECK_LE(a, b, ...) HCP_CHECK_COMPARE_(a, <=, b, __VA_ARGS__)
