#include "hcp/terminal.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>

#include "hybridcp/error.h"

namespace hybridcp::cli {

bool wants_color(const std::string& choice) {
    if (choice == "auto") {
        const char* refused = std::getenv("NO_COLOR");  // no-color.org
        return isatty(STDOUT_FILENO) == 1 && (refused == nullptr || *refused == '\0');
    }
    if (choice != "always" && choice != "never") {
        throw UsageError(fmt::format("--color: {} is not auto, always or never", choice));
    }
    return choice == "always";
}

}  // namespace hybridcp::cli
