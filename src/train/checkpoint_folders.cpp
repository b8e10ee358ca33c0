#include "train/checkpoint_folders.h"

#include <charconv>
#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

#include "core/files.h"
#include "hybridcp/error.h"
#include "train/checkpoint_manifest.h"

namespace hybridcp {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kFolderPrefix = "step-";
constexpr std::string_view kUnfinished = ".tmp";
constexpr std::string_view kReplaced = ".old";  // by a newer one of its name, or about to be

/// The step of a folder named step-N and then `suffix`; nothing for another name.
std::optional<std::int64_t> parse_name(const fs::path& folder, std::string_view suffix) {
    const std::string name = folder.filename().string();
    if (!name.starts_with(kFolderPrefix) || !name.ends_with(suffix)) {
        return std::nullopt;
    }
    std::int64_t step = 0;
    const char* end = name.data() + name.size() - suffix.size();
    const auto parsed = std::from_chars(name.data() + kFolderPrefix.size(), end, step);
    return parsed.ec == std::errc{} && parsed.ptr == end ? std::optional(step) : std::nullopt;
}

std::map<std::int64_t, std::string> list_folders(const std::string& dir, std::string_view suffix) {
    std::map<std::int64_t, std::string> found;
    if (!path_exists(dir)) {
        return found;
    }
    with_files("list " + dir, [&] {
        for (const auto& entry : fs::directory_iterator(dir)) {
            const auto step = parse_name(entry.path(), suffix);
            if (step && entry.is_directory()) {
                found[*step] = entry.path().string();
            }
        }
    });
    return found;
}

}  // namespace

void with_files(const std::string& what, const std::function<void()>& action) {
    try {
        action();
    } catch (const fs::filesystem_error& error) {
        throw FormatError(fmt::format("cannot {}: {}", what, error.code().message()));
    }
}

std::string step_folder(const std::string& dir, std::int64_t step) {
    return (fs::path(dir) / fmt::format("{}{:08}", kFolderPrefix, step)).string();
}

std::optional<std::int64_t> step_of_folder(const std::string& folder) {
    return parse_name(folder, "");
}

std::string unfinished_folder(const std::string& dir, std::int64_t step) {
    return fmt::format("{}{}", step_folder(dir, step), kUnfinished);
}

std::map<std::int64_t, std::string> list_checkpoints(const std::string& dir) {
    return list_folders(dir, "");
}

void name_checkpoint(const std::string& dir, std::int64_t step) {
    const std::string folder = step_folder(dir, step);
    const std::string replaced = fmt::format("{}{}", folder, kReplaced);
    with_files("write " + folder, [&] {
        const bool replaces = fs::exists(folder);
        if (replaces) {
            fs::remove_all(replaced);
            fs::rename(folder, replaced);
        }
        fs::rename(unfinished_folder(dir, step), folder);
        sync_folder(dir);
        if (replaces) {
            fs::remove_all(replaced);
        }
    });
}

void tidy_checkpoints(const std::string& dir) {
    for (const auto& [step, replaced] : list_folders(dir, kReplaced)) {
        with_files("rename " + replaced, [&, folder = step_folder(dir, step), source = replaced] {
            if (fs::exists(folder)) {
                fs::remove_all(source);
            } else {
                fs::rename(source, folder);
            }
        });
    }
    for (const auto& [step, folder] : list_folders(dir, kUnfinished)) {
        with_files("delete " + folder, [&, source = folder] { fs::remove_all(source); });
    }
}

void prune_checkpoints(const std::string& dir, std::int64_t step, std::int64_t keep) {
    std::vector<std::string> older;
    for (const auto& [other_step, folder] : list_checkpoints(dir)) {
        if (other_step < step && fs::exists(fs::path(folder) / kManifestFile)) {
            older.push_back(folder);
        }
    }
    const auto surplus = static_cast<std::int64_t>(older.size()) - (keep - 1);
    for (std::int64_t i = 0; i < surplus; ++i) {
        const std::string& folder = older[static_cast<std::size_t>(i)];
        const std::string unnamed = fmt::format("{}{}", folder, kUnfinished);
        // Renamed first: a crash while files disappear must not leave half of one under its name.
        with_files("delete " + folder, [&] {
            fs::remove_all(unnamed);
            fs::rename(folder, unnamed);
            fs::remove_all(unnamed);
        });
    }
}

std::int64_t set_checkpoints_aside(const std::string& dir, std::int64_t after_step) {
    auto found = list_checkpoints(dir);
    std::erase_if(found, [&](const auto& each) { return each.first <= after_step; });
    for (const auto& [step, folder] : found) {
        const fs::path aside = fs::path(dir) / ("replaced-" + fs::path(folder).filename().string());
        with_files("rename " + folder, [&, source = fs::path(folder)] {
            fs::remove_all(aside);
            fs::rename(source, aside);
        });
    }
    return static_cast<std::int64_t>(found.size());
}

}  // namespace hybridcp
