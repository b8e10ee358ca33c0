#include "train/shared_work.h"

#include <ATen/ATen.h>

#include <cstring>
#include <exception>

#include "hybridcp/error.h"

namespace hybridcp {

namespace {
[[noreturn]] void throw_error(ErrorKind kind, const std::string& message) {
    switch (kind) {
        case ErrorKind::kUsage:
            throw UsageError(message);
        case ErrorKind::kFormat:
            throw FormatError(message);
        case ErrorKind::kComm:
            throw CommError(message);
        case ErrorKind::kDevice:
            throw DeviceError(message);
        case ErrorKind::kNumerics:
            throw NumericsError(message);
        case ErrorKind::kCheck:
            break;
    }
    throw CheckError(message);
}
}  // namespace

void on_rank_zero(const Mesh& mesh, const std::string& op, const std::function<void()>& work) {
    std::int64_t kind = -1;  // no error
    std::string message;
    if (mesh.world->rank() == 0) {
        try {
            work();
        } catch (const Error& error) {
            kind = static_cast<std::int64_t>(error.kind());
            message = error.what();
        } catch (const std::exception& error) {
            kind = static_cast<std::int64_t>(ErrorKind::kCheck);
            message = error.what();
        }
    }
    if (mesh.world->size() > 1) {
        at::Tensor head = at::tensor({kind, static_cast<std::int64_t>(message.size())}, at::kLong)
                              .to(mesh.device);
        mesh.world->broadcast(op, head, 0);
        kind = head[0].item<std::int64_t>();
        if (kind >= 0) {
            at::Tensor text = at::zeros({head[1].item<std::int64_t>() + 1}, at::kByte);
            std::memcpy(text.mutable_data_ptr(), message.data(), message.size());
            text = text.to(mesh.device);
            mesh.world->broadcast(op, text, 0);
            message = static_cast<const char*>(text.cpu().const_data_ptr());
        }
    }
    if (kind >= 0) {
        throw_error(static_cast<ErrorKind>(kind), message);
    }
}

void on_every_rank(const Mesh& mesh, const std::string& op, const std::function<void()>& work) {
    std::exception_ptr failure;
    try {
        work();
    } catch (const std::exception&) {
        failure = std::current_exception();
    }
    at::Tensor failed =
        at::tensor({failure ? std::int64_t{1} : std::int64_t{0}}, at::kLong).to(mesh.device);
    if (mesh.world->size() > 1) {
        mesh.world->all_reduce_max(op, failed);
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
    if (failed.item<std::int64_t>() != 0) {
        throw UsageError(fmt::format("{} failed on another rank, which says why", op));
    }
}

}  // namespace hybridcp
