// What the tests of model files share: golden models, temporary folders, messages of errors.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace hybridcp::testing {

inline std::string golden_model(const std::string& name) {
    return std::string(HCP_GOLDEN_DIR) + "/models/" + name;
}

inline bool mentions(const std::string& message, const std::string& part) {
    return message.find(part) != std::string::npos;
}

/// A folder that lives as long as one test.
class TemporaryFolder {
  public:
    TemporaryFolder() {
        std::string pattern = (std::filesystem::temp_directory_path() / "hcp_test_XXXXXX").string();
        path_ = ::mkdtemp(pattern.data());
    }
    ~TemporaryFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;

    [[nodiscard]] const std::string& path() const { return path_; }
    [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }
    void write(const std::string& name, const std::string& content) const {
        std::ofstream(file(name), std::ios::binary) << content;
    }
    /// Copies the files (not the folders) of `source`.
    void copy_files_of(const std::string& source) const {
        for (const auto& entry : std::filesystem::directory_iterator(source)) {
            if (entry.is_regular_file()) {
                std::filesystem::copy(entry.path(), path_);
            }
        }
    }

  private:
    std::string path_;
};

/// The message of the error of type E that `call` throws; empty when it throws none.
template <typename E, typename Call>
std::string message_of(Call&& call) {
    try {
        call();
    } catch (const E& error) {
        return error.what();
    }
    return "";
}

}  // namespace hybridcp::testing
