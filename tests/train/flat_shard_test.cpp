// Parameters cut in equal parts over ranks: what a gather brings, what a reduction leaves, whose
// memory it is.
#include "train/flat_shard.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "mesh_threads.h"
#include "train/tensor_memory.h"

namespace hybridcp {
namespace {

std::vector<FlatSlot> make_slots() {
    return {{.name = "matrix", .shape = {7, 9}},
            {.name = "scalar", .shape = {1}},
            {.name = "vector", .shape = {35}},
            {.name = "experts", .shape = {3, 5, 2}}};
}

/// The same on every rank.
at::Tensor value_of(const FlatSlot& slot) {
    std::int64_t numel = 1;
    for (const std::int64_t size : slot.shape) {
        numel *= size;
    }
    return at::arange(numel, at::kFloat).add_(static_cast<double>(slot.name.size())).div_(7.0);
}

void write_pieces(const FlatShard& shard) {
    for (const ParameterPiece& piece : shard.pieces()) {
        for (const FlatSlot& slot : make_slots()) {
            if (slot.name == piece.name) {
                at::Tensor value = piece.value;
                value.copy_(value_of(slot).narrow(0, piece.begin, piece.value.numel()));
            }
        }
    }
}

class FlatShards : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FlatShards, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(FlatShards, EveryElementHasOneRankAndTheGatherBringsAll) {
    const int num_ranks = GetParam();
    std::vector<std::int64_t> counts(static_cast<std::size_t>(num_ranks));
    testing::run_mesh(1, num_ranks, [&](const Mesh& mesh) {
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
            FlatShard shard(make_slots(), {.gather_dtype = dtype, .ranks = mesh.world.get()});
            std::int64_t count = 0;
            for (const ParameterPiece& piece : shard.pieces()) {
                count += piece.value.numel();
            }
            counts[static_cast<std::size_t>(mesh.world->rank())] = count;
            write_pieces(shard);
            shard.start_gather();
            shard.finish_gather();
            for (std::size_t i = 0; i < shard.leaves().size(); ++i) {
                const FlatSlot slot = make_slots()[i];
                const NamedParameter& leaf = shard.leaves()[i];
                EXPECT_EQ(leaf.name, slot.name);
                EXPECT_EQ(leaf.value.scalar_type(), dtype);
                EXPECT_TRUE(
                    at::equal(leaf.value.detach(), value_of(slot).view(slot.shape).to(dtype)))
                    << slot.name;
            }
            shard.release();
        }
    });
    std::int64_t total = 0;
    for (const std::int64_t count : counts) {
        total += count;
    }
    EXPECT_EQ(total, 7 * 9 + 1 + 35 + 30);
}

TEST_P(FlatShards, GradientsAreSummedInFp32OverRanksAndPasses) {
    testing::run_mesh(1, GetParam(), [&](const Mesh& mesh) {
        const double rank = mesh.world->rank();
        FlatShard shard(make_slots(), {.gather_dtype = at::kBFloat16, .ranks = mesh.world.get()});
        for (int pass = 0; pass < 2; ++pass) {
            for (const NamedParameter& leaf : shard.leaves()) {
                if (leaf.name == "vector" && mesh.world->rank() == 0) {
                    continue;  // a rank without tokens has no gradient
                }
                at::Tensor value = leaf.value;
                // Not a bf16 number.
                value.mutable_grad() = at::full(value.sizes(), 1.0F + 1.0F / 4096 + rank);
            }
            shard.start_reduce();
            shard.finish_reduce();
            for (const NamedParameter& leaf : shard.leaves()) {
                EXPECT_FALSE(leaf.value.grad().defined());
            }
        }
        double sum = 0;
        for (int r = 0; r < GetParam(); ++r) {
            sum += 1.0 + 1.0 / 4096 + r;
        }
        for (const ParameterPiece& piece : shard.pieces()) {
            const double expected = 2 * (piece.name == "vector" ? sum - 1.0 - 1.0 / 4096 : sum);
            EXPECT_TRUE(
                at::allclose(piece.value.grad(), at::full_like(piece.value, expected), 1e-6, 0.0))
                << piece.name;
        }
    });
}

TEST_P(FlatShards, TheWholeIsInMemoryOnlyBetweenGatherAndRelease) {
    testing::run_mesh(1, GetParam(), [&](const Mesh& mesh) {
        const std::vector<FlatSlot> slots{{.name = "large", .shape = {1000, 1000}}};
        const std::int64_t part_bytes = 4 * ((1000 * 1000 + GetParam() - 1) / GetParam());
        mesh.world->barrier("test");  // Gloo connects before the count starts
        const TensorMemory memory;
        FlatShard shard(slots, {.gather_dtype = at::kBFloat16, .ranks = mesh.world.get()});
        EXPECT_NEAR(static_cast<double>(memory.live_bytes()), 2.0 * static_cast<double>(part_bytes),
                    4096.0);
        shard.finish_gather();
        EXPECT_GE(memory.live_bytes(), 2 * part_bytes + 2 * 1000 * 1000);
        shard.release();
        EXPECT_NEAR(static_cast<double>(memory.live_bytes()), 2.0 * static_cast<double>(part_bytes),
                    4096.0);
    });
}

TEST_P(FlatShards, SavedLeavesSurviveReleaseAndGather) {
    testing::run_mesh(1, GetParam(), [&](const Mesh& mesh) {
        FlatShard shard(make_slots(), {.ranks = mesh.world.get()});
        write_pieces(shard);
        shard.finish_gather();
        const at::Tensor matrix = shard.leaves()[0].value;
        const at::Tensor y = (matrix * matrix).sum();
        shard.release();
        shard.finish_gather();
        y.backward();
        EXPECT_TRUE(at::equal(matrix.grad(), 2 * matrix.detach()));
    });
}

}  // namespace
}  // namespace hybridcp
