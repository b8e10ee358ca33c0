// Parameters laid end to end and cut in equal parts over ranks: one gather brings them all, and
// each is a view of what it brings.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hybridcp/group.h"
#include "train/parameter_piece.h"

namespace hybridcp {

/// Where a parameter stands in the flat order. Starts are multiples of 16 elements, for the
/// kernels' sake.
struct FlatSlot {
    std::string name;
    std::vector<std::int64_t> shape;
    std::int64_t begin = 0;
    std::int64_t count = 0;
};

/// Parameters of one unit that are gathered in one dtype. Each rank of `ranks` keeps 1/P of their
/// fp32 values and gradients; the whole exists, in the gather dtype, between gather and release.
/// The values differ between ranks only by which part they are.
class FlatShard {
  public:
    struct Options {
        at::ScalarType gather_dtype = at::kFloat;
        at::Device device = at::kCPU;
        Group* ranks = nullptr;  // those among which the parameters are cut
    };
    FlatShard(const std::vector<FlatSlot>& parameters, const Options& options);

    /// Leaves of whole shape in the gather dtype with fp32 gradients. They may be read while the
    /// whole is here.
    [[nodiscard]] const std::vector<NamedParameter>& leaves() const { return leaves_; }
    /// This rank's parts, fp32, with gradients of the same shape that are always defined.
    [[nodiscard]] const std::vector<ParameterPiece>& pieces() const { return pieces_; }
    [[nodiscard]] const at::Tensor& values() const { return values_; }        // [n] fp32
    [[nodiscard]] const at::Tensor& gradients() const { return gradients_; }  // [n] fp32

    // Comm: one all-gather (op "parameter_gather") over the ranks, unless it is here or on its way.
    void start_gather();
    /// Returns when the whole is here.
    void finish_gather();
    void release();

    /// Takes the leaves' gradients (absent ones count as zeros) and starts to add this rank's part
    /// of their sum over ranks to gradients(). Comm: one reduce-scatter (op "gradient_scatter").
    void start_reduce();
    void finish_reduce();

  private:
    void make_leaves();
    void make_pieces();

    Options options_;
    std::vector<FlatSlot> slots_;
    std::int64_t part_numel_ = 0;
    at::Tensor values_, gradients_;  // [part]
    at::Tensor whole_;               // [P * part] gather dtype; its memory comes and goes
    std::vector<NamedParameter> leaves_;
    std::vector<ParameterPiece> pieces_;
    std::unique_ptr<Pending> gather_, reduce_;
};

}  // namespace hybridcp
