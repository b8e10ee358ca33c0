// The recorder: every allocation has the class of its scope, in the backward pass too.
#include "train/tensor_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "kernels/linear/linear.h"
#include "mesh_threads.h"
#include "train/memory_report.h"

namespace hybridcp {
namespace {

constexpr std::int64_t kBytes = 64 * 64 * 4;

at::Tensor matrix() {
    return at::ones({64, 64});
}

std::int64_t sum(const BytesByClass& bytes) {
    return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
}

TEST(TensorMemory, AllocationsAreOfTheInnermostScopesClassAndFreesOfThatOfTheAllocation) {
    const TensorMemory memory;
    at::Tensor outer, inner, free = matrix();
    {
        const MemoryScope scope(MemoryClass::kOptimizer);
        outer = matrix();
        {
            const MemoryScope nested(MemoryClass::kExchange);
            inner = matrix();
        }
        free.reset();
        outer = at::cat({outer, matrix()});
    }
    EXPECT_EQ(memory.live_bytes(MemoryClass::kOptimizer), 2 * kBytes);
    EXPECT_EQ(memory.live_bytes(MemoryClass::kExchange), kBytes);
    EXPECT_EQ(memory.live_bytes(MemoryClass::kOther), 0);
    EXPECT_EQ(memory.live_bytes(), 3 * kBytes);
    inner.reset();
    outer.reset();
    EXPECT_EQ(memory.live_bytes(), 0);
    const MemoryRecord record = memory.record();
    EXPECT_EQ(record.peak_bytes, 5 * kBytes);  // two to be joined, and the joined one, and inner
    EXPECT_EQ(sum(record.at_peak_bytes), record.peak_bytes);
    EXPECT_EQ(record.at_peak_bytes[index_of(MemoryClass::kOptimizer)], 4 * kBytes);
    EXPECT_EQ(record.class_peak_bytes[index_of(MemoryClass::kOther)], kBytes);
}

TEST(TensorMemory, PeaksCanStartAnew) {
    TensorMemory memory;
    at::Tensor kept = matrix();
    (void)at::zeros({1000, 1000});
    memory.reset_peaks();
    EXPECT_EQ(memory.record().peak_bytes, kBytes);
    EXPECT_EQ(memory.record().class_peak_bytes[index_of(MemoryClass::kOther)], kBytes);
}

TEST(TensorMemory, BackwardIsOfTheClassOfTheForwardAndWeightGradientsAreGradients) {
    at::Tensor weight = matrix().requires_grad_(true);
    const at::Tensor x = matrix().requires_grad_(true);
    TensorMemory memory;
    at::Tensor y;
    {
        const MemoryScope scope(MemoryClass::kFullAttention);
        y = linear_projection(x, weight).sigmoid();
    }
    {
        const MemoryScope scope(MemoryClass::kFeedForward);
        y = y * 2;
    }
    memory.reset_peaks();
    y.backward(matrix());
    const MemoryRecord record = memory.record();
    EXPECT_GE(record.class_peak_bytes[index_of(MemoryClass::kFullAttention)], 2 * kBytes);
    EXPECT_LE(record.class_peak_bytes[index_of(MemoryClass::kFeedForward)] - 2 * kBytes, 64);
    EXPECT_EQ(memory.live_bytes(MemoryClass::kGradients), kBytes);
}

TEST(TensorMemory, ABufferThatGloosWorkerFreesLastIsCounted) {
    testing::run_mesh(1, 4, [](const Mesh& mesh) {
        mesh.world->barrier("test");
        const TensorMemory memory;
        const at::Tensor local = matrix();
        for (int i = 0; i < 50; ++i) {
            const at::Tensor rows = local.t();  // a copy of it is sent
            (void)mesh.world->all_gather("test", rows);
            (void)mesh.world->all_to_all("test", rows, {16, 16, 16, 16}, {16, 16, 16, 16});
            ASSERT_EQ(memory.live_bytes(), kBytes) << i;
        }
        // What is sent, what comes, and Gloo's own copy of that.
        EXPECT_EQ(memory.record().class_peak_bytes[index_of(MemoryClass::kExchange)], 9 * kBytes);
    });
}

TEST(MemoryReport, TheRankWithTheLargestPeakIsReported) {
    testing::run_mesh(1, 3, [](const Mesh& mesh) {
        const int rank = mesh.world->rank();
        MemoryRecord record{.peak_bytes = rank == 1 ? 5'000'000 : rank};
        record.at_peak_bytes[index_of(MemoryClass::kLogits)] = record.peak_bytes;
        record.class_peak_bytes[index_of(MemoryClass::kLogits)] = record.peak_bytes;
        record.class_peak_bytes[index_of(MemoryClass::kExchange)] = rank == 1 ? 1234 : 0;
        const MemoryReport report = largest_memory(record, *mesh.world);
        EXPECT_EQ(report.rank, 1);
        EXPECT_EQ(report.record.peak_bytes, 5'000'000);
        EXPECT_EQ(to_table(report),
                  "memory of tensors in the first step: 5.00 MB at the peak, on rank 1, where it "
                  "is largest of 3\n"
                  "                           at the peak    own peak\n"
                  "  logits and loss              5.00 MB     5.00 MB\n"
                  "  exchange                     0.00 kB     1.23 kB");
    });
}

}  // namespace
}  // namespace hybridcp
