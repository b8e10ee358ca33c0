#include "hybridcp/error.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace hybridcp {

Error::Error(ErrorKind kind, const std::string& message, std::source_location where)
    : std::runtime_error(message), kind_(kind), where_(where) {}

int Error::exit_status() const {
    return kind_ == ErrorKind::kUsage || kind_ == ErrorKind::kFormat ? 2 : 1;
}

std::size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<std::size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 1; i <= a.size(); ++i) {
        std::size_t diagonal = row[0];
        row[0] = i;
        for (std::size_t j = 1; j <= b.size(); ++j) {
            const std::size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            diagonal = row[j];
            row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
        }
    }
    return row[b.size()];
}

namespace detail {
void fail_check(const char* expression,
                const std::string& values,
                const std::string& hint,
                std::source_location where) {
    throw UsageError(fmt::format("{}: expected {}{}{}", hint, expression,
                                 values.empty() ? "" : ", got ", values),
                     where);
}
}  // namespace detail

}  // namespace hybridcp
