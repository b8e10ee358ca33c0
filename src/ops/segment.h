// A part of a model as one node of the autograd graph: what activation checkpointing recomputes,
// and what sharded parameters are gathered for.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "ops/exchange_tape.h"

namespace hybridcp {

/// Called around the passes of a segment, where they are set. The first forward pass lies between
/// the forward hooks; backward, with the recomputed forward pass, between the backward hooks. When
/// after_backward is called, the gradients of the segment's parameters are in their leaves. A pass
/// that throws does not call its second hook.
struct SegmentHooks {
    std::function<void()> before_forward = nullptr;
    std::function<void()> after_forward = nullptr;
    std::function<void()> before_backward = nullptr;
    std::function<void()> after_backward = nullptr;
};

struct SegmentOptions {
    /// Keep the inputs and the tape instead of the activations, and run the function again in
    /// backward.
    bool recompute = false;
    SegmentHooks hooks = {};
};

/// Outputs may be undefined, the same ones in both passes. `tape` is for the context of the ops
/// (CpContext::tape); null where nothing is recomputed.
using SegmentFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs,
                                                              ExchangeTape* tape)>;

/// Runs `function` as one node. Gradients of the leaves that it uses beside its inputs (parameters)
/// are added to their .grad, whichever gradients backward was asked for. What the function holds
/// must outlive backward, which can run once and cannot itself be differentiated. Where no gradient
/// is recorded, or there is neither recompute nor a backward hook, the function is called as it is,
/// between the forward hooks.
/// Shapes: any, floating-point inputs; outputs that are not floating-point have no gradient.
/// Errors: UsageError when backward runs twice, or the second pass uses another op than the first
/// (ExchangeTape); what the function throws.
[[nodiscard]] std::vector<at::Tensor> run_segment(const std::vector<at::Tensor>& inputs,
                                                  SegmentFunction function,
                                                  SegmentOptions options);

}  // namespace hybridcp
