// The folders of a run's checkpoints, by name alone: DIR/step-00000050 is complete,
// DIR/step-00000050.tmp is being written (or was, when its run died). One process calls these.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

namespace hybridcp {

[[nodiscard]] std::string step_folder(const std::string& dir, std::int64_t step);
/// N of a folder named step-N; nothing for another name.
[[nodiscard]] std::optional<std::int64_t> step_of_folder(const std::string& folder);
/// Where the checkpoint of a step is written before it gets its name.
[[nodiscard]] std::string unfinished_folder(const std::string& dir, std::int64_t step);

/// All DIR/step-N, by step; none when `dir` does not exist. Errors: FormatError when it cannot be
/// listed.
[[nodiscard]] std::map<std::int64_t, std::string> list_checkpoints(const std::string& dir);

/// Gives a finished folder the name of its step. An older one of that name is kept until then.
/// Errors: FormatError naming the folder and the system's reason.
void name_checkpoint(const std::string& dir, std::int64_t step);

/// Removes what a save that died has left, and gives back its name to a checkpoint that such a save
/// was about to replace.
void tidy_checkpoints(const std::string& dir);

/// Deletes checkpoints of `dir` that are older than `step`, but for the newest `keep` - 1 of them.
/// Folders without a manifest stay: someone may want to look at them.
void prune_checkpoints(const std::string& dir, std::int64_t step, std::int64_t keep);

/// Renames every DIR/step-N with N > after_step to DIR/replaced-step-N (replacing those), for a run
/// that goes another way from there. Returns how many there were.
std::int64_t set_checkpoints_aside(const std::string& dir, std::int64_t after_step);

/// Runs an action of std::filesystem. Errors: FormatError "cannot WHAT: the system's reason".
void with_files(const std::string& what, const std::function<void()>& action);

}  // namespace hybridcp
