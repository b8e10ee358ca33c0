#include "model/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>

#include "core/files.h"
#include "hybridcp/error.h"
#include "model/test_files.h"

namespace hybridcp {
namespace {

using testing::golden_model;
using testing::mentions;
using testing::message_of;
using testing::TemporaryFolder;

std::string with_header(const std::string& header, std::size_t data_bytes) {
    const std::uint64_t header_bytes = header.size();
    std::string content(sizeof header_bytes, '\0');
    std::memcpy(content.data(), &header_bytes, sizeof header_bytes);
    return content + header + std::string(data_bytes, '\1');
}

class Safetensors : public ::testing::Test {
  protected:
    /// The FormatError of opening a file with this content; "" when it opens.
    std::string error_of(const std::string& content) {
        folder_.write("x.safetensors", content);
        return message_of<FormatError>([&] { SafetensorsFile(folder_.file("x.safetensors")); });
    }
    std::string error_of_header(const std::string& header, std::size_t data_bytes) {
        return error_of(with_header(header, data_bytes));
    }
    TemporaryFolder folder_;
};

TEST_F(Safetensors, EveryDtypeComesBackBitForBit) {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const at::ScalarType dtype : {at::kBool, at::kByte, at::kBFloat16, at::kHalf, at::kInt,
                                       at::kFloat, at::kLong, at::kDouble}) {
        for (const std::vector<std::int64_t>& shape :
             {std::vector<std::int64_t>{}, {0}, {3}, {2, 0, 5}, {3, 1, 7}}) {
            tensors.emplace_back(fmt::format("{}.{}", at::toString(dtype), tensors.size()),
                                 at::randn(shape, at::kDouble).mul(100).to(dtype));
        }
    }
    tensors.emplace_back("transposed", at::randn({4, 6}).t());
    tensors.emplace_back("special", at::tensor({std::numeric_limits<float>::quiet_NaN(), -0.0F,
                                                -std::numeric_limits<float>::infinity()}));
    tensors.emplace_back("name \"quoted\" \xc3\xa9", at::ones({1}));
    write_safetensors(folder_.file("a.safetensors"), tensors, {{"format", "pt"}, {"k", "v"}});

    const SafetensorsFile file(folder_.file("a.safetensors"));
    EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"k", "v"}}));
    ASSERT_EQ(file.entries().size(), tensors.size());
    for (const auto& [name, value] : tensors) {
        const at::Tensor read = file.read(name);
        ASSERT_EQ(read.scalar_type(), value.scalar_type()) << name;
        ASSERT_EQ(read.sizes(), value.sizes()) << name;
        const at::Tensor expected = value.contiguous();
        EXPECT_EQ(0, value.numel() == 0
                         ? 0
                         : std::memcmp(read.data_ptr(), expected.data_ptr(), read.nbytes()))
            << name;
        EXPECT_EQ(file.entries().at(name).begin % value.element_size(), 0U)
            << name << " is not aligned";
    }
}

TEST_F(Safetensors, AMissingTensorOrFileIsNamed) {
    write_safetensors(folder_.file("a.safetensors"), {{"x", at::ones({2})}});
    const SafetensorsFile file(folder_.file("a.safetensors"));
    EXPECT_TRUE(
        mentions(message_of<FormatError>([&] { (void)file.read("y"); }), "has no tensor y"));
    EXPECT_TRUE(
        mentions(message_of<FormatError>([&] { SafetensorsFile(folder_.file("none")); }), "/none"));
    EXPECT_TRUE(mentions(message_of<FormatError>([&] { SafetensorsFile(folder_.path()); }),
                         "not a regular file"));
}

TEST_F(Safetensors, WritingRefusesWhatTheFormatCannotHold) {
    const std::string path = folder_.file("a.safetensors");
    const at::Tensor one = at::ones({1});
    EXPECT_TRUE(mentions(
        message_of<FormatError>([&] { write_safetensors(path, {{"x", one}, {"x", one}}); }),
        "tensor name x is reserved or used twice"));
    EXPECT_TRUE(
        mentions(message_of<FormatError>([&] { write_safetensors(path, {{"__metadata__", one}}); }),
                 "reserved"));
    EXPECT_TRUE(mentions(message_of<FormatError>(
                             [&] { write_safetensors(path, {{"x", one.to(at::kComplexFloat)}}); }),
                         "ComplexFloat"));
    EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(Safetensors, DamagedHeadersAreFormatErrors) {
    EXPECT_TRUE(mentions(error_of(""), "empty"));
    EXPECT_TRUE(mentions(error_of("1234567"), "truncated"));
    EXPECT_TRUE(mentions(error_of(std::string(8, '\xff')), "truncated"));
    EXPECT_TRUE(mentions(error_of(std::string(8, '\0')), "not valid JSON"));
    EXPECT_TRUE(mentions(error_of_header("[]", 0), "JSON object"));
    EXPECT_TRUE(mentions(error_of_header("3", 0), "JSON object"));
    EXPECT_TRUE(mentions(error_of_header("{\"x\":3}", 0), "not valid JSON"));
    EXPECT_TRUE(mentions(error_of_header("{\"\xff\":3}", 0), "not valid JSON"));
    EXPECT_TRUE(mentions(error_of_header(std::string(100000, '['), 0), "not valid JSON"));
    EXPECT_TRUE(mentions(error_of_header(R"({"__metadata__":{"a":1}})", 0), "not valid JSON"));
    EXPECT_EQ(error_of_header("{}", 0), "");
}

struct BadTensor {
    const char* header;  // of tensor x, with 8 bytes of data in the file
    const char* message;
};

TEST_F(Safetensors, DamagedTensorsAreNamed) {
    const BadTensor cases[] = {
        {R"("dtype":"F32","shape":[2])", "data_offsets"},
        {R"("dtype":"F32","shape":[2],"data_offsets":[0])", "data_offsets"},
        {R"("dtype":"F32","shape":[2],"data_offsets":[0,8,9])", "data_offsets"},
        {R"("dtype":"F32","shape":2,"data_offsets":[0,8])", "shape"},
        {R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])", "shape holds a value"},
        {R"("dtype":"F32","shape":[-1,-2],"data_offsets":[0,8])", "shape holds a value"},
        {R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])", "shape holds a value"},
        {R"("dtype":"F32","shape":["2"],"data_offsets":[0,8])", "shape holds a value"},
        {R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])", "data_offsets holds a value"},
        {R"("dtype":"F32","shape":[2],"data_offsets":[8,0])", "does not fit"},
        {R"("dtype":"F32","shape":[3],"data_offsets":[0,8])", "does not fit"},
        {R"("dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,8])", "too large"},
        {R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0])", "too large"},
        {R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0])", "too large"},
        {R"("dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0])", "too large"},
        {R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8])",
         "shape holds a value"},
        {R"("dtype":"F32","shape":[2],"data_offsets":[18446744073709551608,18446744073709551616])",
         "data_offsets holds a value"},
        {R"("dtype":"F32","shape":[2],"data_offsets":[9223372036854775799,9223372036854775807])",
         "truncated"},
        {R"("dtype":"F32","shape":[4],"data_offsets":[0,16])", "truncated"},
        {R"("dtype":"F32","shape":[1],"data_offsets":[4,8])", "leaves a gap"},
        {R"("dtype":"F32","shape":[1],"data_offsets":[0,4])", "4 bytes after the last tensor"},
        {R"("dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8])", "F8_E4M3 is not supported"},
        {R"("dtype":7,"shape":[8],"data_offsets":[0,8])", "not valid JSON"},
    };
    for (const BadTensor& bad : cases) {
        const std::string message =
            error_of_header(fmt::format(R"({{"x":{{{}}}}})", bad.header), 8);
        EXPECT_TRUE(mentions(message, bad.message)) << bad.header << " gives: " << message;
        EXPECT_TRUE(mentions(message, "x.safetensors")) << message;
    }
}

TEST_F(Safetensors, OverlappingRangesAreRefused) {
    const std::string overlap = error_of_header(
        R"({"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
        8);
    EXPECT_TRUE(mentions(overlap, "tensor b overlaps another")) << overlap;
    const std::string same = error_of_header(
        R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
        8);
    EXPECT_TRUE(mentions(same, "overlaps another")) << same;
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
    write_safetensors(folder_.file("a.safetensors"),
                      {{"a", at::ones({3})}, {"b", at::ones({5}, at::kByte)}}, {{"format", "pt"}});
    const std::string whole = read_file(folder_.file("a.safetensors"));
    for (std::size_t size = 0; size < whole.size(); ++size) {
        EXPECT_NE(error_of(whole.substr(0, size)), "")
            << size << " of " << whole.size() << " bytes";
    }
    EXPECT_EQ(error_of(whole), "");
    EXPECT_TRUE(mentions(error_of(whole + "z"), "1 bytes after the last tensor"));
}

// Whatever single byte of the header is damaged, the file is either refused by FormatError or still
// consistent, so that all its tensors can be read.
TEST_F(Safetensors, FuzzedHeadersNeverCrash) {
    write_safetensors(
        folder_.file("a.safetensors"),
        {{"a", at::ones({3, 2})}, {"b", at::ones({5}, at::kByte)}, {"c", at::ones({2}, at::kLong)}},
        {{"format", "pt"}});
    const std::string whole = read_file(folder_.file("a.safetensors"));
    const std::string path = folder_.file("x.safetensors");
    int refused = 0;
    for (std::size_t at = 0; at + 45 < whole.size(); ++at) {
        for (const char byte : {'\0', '\xff', '-', '9', '"', ']', 'e'}) {
            std::string damaged = whole;
            damaged[at] = byte;
            folder_.write("x.safetensors", damaged);
            try {
                const SafetensorsFile file(path);
                for (const auto& [name, entry] : file.entries()) {
                    EXPECT_EQ(file.read(name).sizes().vec(), entry.shape);
                }
            } catch (const FormatError&) {
                ++refused;
            }  // anything else fails the test
        }
    }
    EXPECT_GT(refused, 500);
}

TEST_F(Safetensors, ReadsTheGoldenFiles) {
    const SafetensorsFile file(std::string(HCP_GOLDEN_DIR) +
                               "/models/dense_mini_bf16/model.safetensors");
    EXPECT_EQ(file.read("model.embed_tokens.weight").scalar_type(), at::kBFloat16);
    EXPECT_EQ(file.read("model.layers.0.linear_attn.conv1d.weight").sizes(),
              at::IntArrayRef({64, 1, 4}));
}

}  // namespace
}  // namespace hybridcp
