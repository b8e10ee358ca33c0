// Reads a checkpoint folder by parameter and range, whatever number of ranks has written it, and
// finds out what is damaged.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/parameter_source.h"
#include "model/safetensors.h"
#include "train/checkpoint_manifest.h"

namespace hybridcp {

/// What is needed to go on, besides tensors.
struct TrainState {
    std::int64_t step = 0;           // finished updates
    std::int64_t consumed_rows = 0;  // of the data order
    std::int64_t seed = 0;
    std::string data_fingerprint = {};  // what the order of rows depends on
    std::uint64_t recipe_hash = 0;
    std::string topology = {};  // of the run that saved, for people

    [[nodiscard]] std::string to_json() const;
    /// Errors: FormatError naming `path`.
    [[nodiscard]] static TrainState from_json(const std::string& text, const std::string& path);
};

/// Not for use from several threads at once.
class CheckpointReader final : public ParameterSource {
  public:
    /// Reads the manifest. Errors: FormatError naming what is missing or damaged.
    explicit CheckpointReader(std::string folder);

    [[nodiscard]] const std::string& folder() const { return folder_; }
    [[nodiscard]] const Manifest& manifest() const { return manifest_; }
    /// Errors: FormatError when its file is damaged.
    [[nodiscard]] TrainState state() const;

    /// Writes elements [begin, begin + n) of a parameter into `into` [n], fp32 on any device.
    /// Errors: FormatError naming file and tensor; UsageError when there is no such parameter.
    void read_run(PieceKind kind,
                  const std::string& parameter,
                  std::int64_t begin,
                  const at::Tensor& into) const;
    /// The same of the values, for a parameter of the same shape.
    void read(const ParameterShape& parameter,
              std::int64_t begin,
              const at::Tensor& into) const override;
    /// The whole of a parameter's values, in its shape, fp32 on the CPU.
    [[nodiscard]] at::Tensor value(const std::string& parameter) const;

    /// A file (its size and what its own checksum covers), or one of its tensors. All checks
    /// together cover every byte of the checkpoint once.
    struct Check {
        std::string file;
        std::string tensor = {};  // empty: the file
        std::uint64_t size_bytes = 0;
        std::uint64_t xxh64 = 0;
    };
    [[nodiscard]] std::vector<Check> checks() const;
    /// What is wrong, naming file, tensor and bytes; nothing when all is as it was written.
    [[nodiscard]] std::optional<std::string> damage(const Check& check) const;

  private:
    [[nodiscard]] std::string path_of(const std::string& file) const {
        return folder_ + "/" + file;
    }
    void check_file(const std::string& name) const;
    void check_tensor(const Check& check) const;
    [[nodiscard]] const SafetensorsFile& open_part(const std::string& name) const;

    std::string folder_;
    Manifest manifest_;
    mutable std::map<std::string, std::unique_ptr<SafetensorsFile>> open_parts_;  // checked headers
};

/// Says why a checkpoint folder cannot be used, or nothing when every byte is as it was written.
[[nodiscard]] std::optional<std::string> checkpoint_damage(const std::string& folder);

/// The newest complete checkpoint of `dir`. Damaged or partial ones are skipped, with a line each
/// in `skipped`.
[[nodiscard]] std::optional<std::string> latest_checkpoint(const std::string& dir,
                                                           std::vector<std::string>& skipped);

}  // namespace hybridcp
