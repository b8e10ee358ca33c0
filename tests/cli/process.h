// Runs the built `hcp` as a user would: as processes, with their output and exit status.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace hybridcp::testing {

/// A folder of one test, empty at first, removed at the end.
class ScratchFolder {
  public:
    ScratchFolder() {
        std::string pattern = (std::filesystem::temp_directory_path() / "hcp-test-XXXXXX").string();
        if (mkdtemp(pattern.data()) == nullptr) {
            throw std::runtime_error("cannot make " + pattern);
        }
        path_ = pattern;
    }
    ~ScratchFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    ScratchFolder(const ScratchFolder&) = delete;
    ScratchFolder& operator=(const ScratchFolder&) = delete;
    [[nodiscard]] std::string operator/(const std::string& name) const {
        return path_ + "/" + name;
    }

  private:
    std::string path_;
};

inline std::string read_text(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
}

inline void write_text(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
}

/// One `hcp` process; stdout and stderr go to one file.
class HcpProcess {
  public:
    HcpProcess(const std::vector<std::string>& arguments,
               const std::map<std::string, std::string>& environment = {}) {
        std::vector<std::string> words = {"hcp"};
        words.insert(words.end(), arguments.begin(), arguments.end());
        std::vector<char*> list;
        list.reserve(words.size() + 1);
        for (std::string& word : words) {
            list.push_back(word.data());
        }
        list.push_back(nullptr);
        pid_ = fork();
        if (pid_ == 0) {
            const int file = open(output_path().c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
            dup2(file, STDOUT_FILENO);
            dup2(file, STDERR_FILENO);
            for (const auto& [name, value] : environment) {
                setenv(name.c_str(), value.c_str(), 1);
            }
            execv(HCP_BINARY, list.data());
            _exit(127);
        }
    }
    ~HcpProcess() {
        if (pid_ > 0) {
            kill(pid_, SIGKILL);
            waitpid(pid_, nullptr, 0);
        }
    }
    HcpProcess(const HcpProcess&) = delete;
    HcpProcess& operator=(const HcpProcess&) = delete;

    [[nodiscard]] pid_t pid() const { return pid_; }
    [[nodiscard]] std::string output() const { return read_text(output_path()); }

    /// The exit status (128 + number when a signal ended it); -1 when it still runs after
    /// `patience`.
    int wait(std::chrono::seconds patience = std::chrono::seconds(120)) {
        const auto deadline = std::chrono::steady_clock::now() + patience;
        int status = 0;
        while (waitpid(pid_, &status, WNOHANG) == 0) {
            if (std::chrono::steady_clock::now() > deadline) {
                return -1;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        pid_ = -1;
        return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }

    /// Waits until the output contains `text`; false when that takes longer than `patience`.
    [[nodiscard]] bool wait_for_output(
        const std::string& text, std::chrono::seconds patience = std::chrono::seconds(60)) const {
        const auto deadline = std::chrono::steady_clock::now() + patience;
        while (output().find(text) == std::string::npos) {
            if (std::chrono::steady_clock::now() > deadline) {
                return false;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        return true;
    }

  private:
    [[nodiscard]] std::string output_path() const { return folder_ / "output"; }

    ScratchFolder folder_;
    pid_t pid_ = -1;
};

struct Outcome {
    int status = 0;
    std::string output;
};

inline Outcome run_hcp(const std::vector<std::string>& arguments,
                       const std::map<std::string, std::string>& environment = {}) {
    HcpProcess process(arguments, environment);
    const int status = process.wait();
    return {status, process.output()};
}

inline std::string golden(const std::string& path) {
    return std::string(HCP_GOLDEN_DIR) + "/" + path;
}

inline std::size_t count(const std::string& text, const std::string& word) {
    std::size_t number = 0;
    for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
        ++number;
    }
    return number;
}

}  // namespace hybridcp::testing
