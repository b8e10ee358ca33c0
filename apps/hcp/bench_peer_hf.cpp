#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>

#include "hcp/bench_peer_script.h"
#include "hcp/bench_peers.h"
#include "hybridcp/error.h"

namespace hybridcp::cli {

namespace {

/// In the child: only calls that are safe after fork.
[[noreturn]] void become_python(const char* python, int input, int output) {
    ::dup2(input, STDIN_FILENO);
    ::dup2(output, STDOUT_FILENO);
    const int nowhere = ::open("/dev/null", O_WRONLY);  // its warnings are not ours
    ::dup2(nowhere, STDERR_FILENO);
    ::execlp(python, python, "-c", kHuggingFacePeerScript, static_cast<char*>(nullptr));
    ::_exit(127);
}

std::array<int, 2> make_pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
        throw CommError("bench gdn --peer hf: cannot make a pipe");
    }
    return ends;
}

}  // namespace

HuggingFacePeer::HuggingFacePeer(const std::string& python, int threads) : python_(python) {
    std::signal(SIGPIPE, SIG_IGN);  // a process that has ended shows as the end of its answers
    const auto requests = make_pipe();
    const auto answers = make_pipe();
    ::setenv("OMP_NUM_THREADS", std::to_string(threads).c_str(), 1);  // for it alone: ours is set
    pid_ = ::fork();
    if (pid_ == 0) {
        become_python(python_.c_str(), requests[0], answers[1]);
    }
    ::close(requests[0]);
    ::close(answers[1]);
    to_ = ::fdopen(requests[1], "w");
    from_ = ::fdopen(answers[0], "r");
    try {
        versions_ = ask({{"op", "start"}, {"threads", threads}}).at("versions");
    } catch (const CommError& error) {
        stop();
        throw UsageError(
            fmt::format("bench gdn --peer hf needs Python with Transformers: {} -m pip install "
                        "torch transformers, or --python PATH of one that has them ({})",
                        python_, error.what()));
    }
}

HuggingFacePeer::~HuggingFacePeer() {
    stop();
}

void HuggingFacePeer::stop() {
    std::fclose(to_);
    std::fclose(from_);
    if (pid_ > 0) {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
}

nlohmann::json HuggingFacePeer::ask(const nlohmann::json& request) {
    std::fputs((request.dump() + "\n").c_str(), to_);
    std::fflush(to_);
    char* line = nullptr;
    std::size_t capacity = 0;
    const ssize_t length = ::getline(&line, &capacity, from_);
    const std::string text = length > 0 ? std::string(line, static_cast<std::size_t>(length)) : "";
    std::free(line);
    const nlohmann::json answer = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!answer.is_object()) {
        throw CommError(fmt::format("{} has ended or does not answer", python_));
    }
    if (answer.contains("error")) {
        throw CommError(answer.at("error").get<std::string>());
    }
    return answer;
}

void HuggingFacePeer::set_up(const BenchGdnOptions& options,
                             std::int64_t tokens,
                             const std::string& dtype) {
    (void)ask({{"op", "set_up"},
               {"tokens", tokens},
               {"dtype", dtype},
               {"device", options.device},
               {"key_heads", options.key_heads},
               {"value_heads", options.value_heads},
               {"key_dim", options.key_dim},
               {"value_dim", options.value_dim}});
}

LaneTimes HuggingFacePeer::run() {
    const nlohmann::json answer = ask({{"op", "run"}});
    return {.us = {{"forward", answer.at("forward_us")}, {"backward", answer.at("backward_us")}},
            .bytes = {{"forward+backward", answer.at("peak_bytes")}}};
}

}  // namespace hybridcp::cli
