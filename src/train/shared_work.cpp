#include "train/shared_work.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "hybridcp/error.h"

namespace hybridcp {

namespace {

/// [size] uint8, zeros after the text.
at::Tensor to_bytes(const std::string& text, std::int64_t size) {
    at::Tensor bytes = at::zeros({size}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
    return bytes;
}

std::string to_text(const at::Tensor& bytes, std::int64_t size) {
    return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<std::size_t>(size)};
}

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

struct Failure {
    std::int64_t kind = -1;  // none
    std::string message = {};
};

Failure attempt(const std::function<void()>& work) {
    try {
        work();
    } catch (const Error& error) {
        return {static_cast<std::int64_t>(error.kind()), error.what()};
    } catch (const std::exception& error) {
        return {static_cast<std::int64_t>(ErrorKind::kCheck), error.what()};
    }
    return {};
}

/// Throws the failure of rank `root`, if there is one, on every rank.
void throw_together(const Mesh& mesh, const std::string& op, Failure failure, int root) {
    if (mesh.world->size() > 1) {
        at::Tensor head =
            at::tensor({failure.kind, static_cast<std::int64_t>(failure.message.size())}, at::kLong)
                .to(mesh.device);
        mesh.world->broadcast(op, head, root);
        failure.kind = head[0].item<std::int64_t>();
        if (failure.kind >= 0) {
            const std::int64_t size = head[1].item<std::int64_t>();
            failure.message.resize(static_cast<std::size_t>(size));
            at::Tensor text = to_bytes(failure.message, size).to(mesh.device);
            mesh.world->broadcast(op, text, root);
            failure.message = to_text(text.cpu(), size);
        }
    }
    if (failure.kind >= 0) {
        throw_error(static_cast<ErrorKind>(failure.kind), failure.message);
    }
}
}  // namespace

void on_rank_zero(const Mesh& mesh, const std::string& op, const std::function<void()>& work) {
    throw_together(mesh, op, mesh.world->rank() == 0 ? attempt(work) : Failure{}, 0);
}

void on_every_rank(const Mesh& mesh, const std::string& op, const std::function<void()>& work) {
    const Failure failure = attempt(work);
    const int num_ranks = mesh.world->size();
    // The lowest rank that failed has the largest number.
    at::Tensor rank =
        at::tensor({std::int64_t{failure.kind < 0 ? 0 : num_ranks - mesh.world->rank()}}, at::kLong)
            .to(mesh.device);
    if (num_ranks > 1) {
        mesh.world->all_reduce_max(op, rank);
    }
    if (const auto found = static_cast<int>(rank.item<std::int64_t>()); found > 0) {
        throw_together(mesh, op, failure, num_ranks - found);
    }
}

std::vector<std::string> gather_text(const Mesh& mesh,
                                     const std::string& op,
                                     const std::string& text) {
    if (mesh.world->size() == 1) {
        return {text};
    }
    const auto size = static_cast<std::int64_t>(text.size());
    const at::Tensor sizes =
        mesh.world->all_gather(op, at::tensor({size}, at::kLong).to(mesh.device)).cpu();
    const std::int64_t largest = std::max<std::int64_t>(1, sizes.max().item<std::int64_t>());
    const at::Tensor bytes =
        mesh.world->all_gather(op, to_bytes(text, largest).to(mesh.device)).cpu();
    std::vector<std::string> texts;
    for (std::int64_t rank = 0; rank < bytes.size(0); ++rank) {
        texts.push_back(to_text(bytes[rank], sizes[rank].item<std::int64_t>()));
    }
    return texts;
}

}  // namespace hybridcp
