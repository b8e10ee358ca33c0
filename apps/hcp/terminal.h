// What a command may do on the terminal that it writes to.
#pragma once

#include <string>

namespace hybridcp::cli {

/// Of --color: auto (a terminal, unless NO_COLOR is set), always or never. Errors: UsageError for
/// another word.
[[nodiscard]] bool wants_color(const std::string& choice);

}  // namespace hybridcp::cli
