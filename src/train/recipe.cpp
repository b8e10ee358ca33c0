#include "train/recipe.h"

#include <fmt/ranges.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "core/files.h"
#include "hybridcp/error.h"
#include "train/recipe_fields.h"

namespace hybridcp {

namespace {

using recipe_fields::Rule;

/// A value as it was given: by the file (or the last override of that key).
struct Given {
    YAML::Node node;
    std::string where;  // "recipe.yaml:12" or "override 'train.steps=3'"
};
using GivenValues = std::map<std::string, Given>;  // by full key path

std::string join_path(const std::string& prefix, const std::string& name) {
    return prefix.empty() ? name : prefix + "." + name;
}

/// Lists the leaves under `node` (scalars, lists, nulls and empty blocks) by their full path.
/// `where_of` says where a node stands.
template <typename WhereOf>
void flatten(const YAML::Node& node,
             const std::string& path,
             const WhereOf& where_of,
             GivenValues& into) {
    if (!node.IsMap() || node.size() == 0) {
        if (!into.emplace(path, Given{node, where_of(node)}).second) {
            throw UsageError(fmt::format("{}: {} is given twice", where_of(node), path));
        }
        return;
    }
    for (const auto& entry : node) {
        if (!entry.first.IsScalar()) {
            throw UsageError(fmt::format("{}: a key must be one word", where_of(entry.first)));
        }
        flatten(entry.second, join_path(path, entry.first.Scalar()), where_of, into);
    }
}

YAML::Node parse_yaml(const std::string& text, const std::string& where) {
    try {
        return YAML::Load(text);
    } catch (const YAML::Exception& error) {
        throw FormatError(
            fmt::format("{}:{}: not valid YAML: {}", where, error.mark.line + 1, error.msg));
    }
}

void apply_override(const std::string& text, GivenValues& values) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0) {
        throw UsageError(fmt::format("override '{}': write key.path=value", text));
    }
    std::string where = fmt::format("override '{}'", text);
    GivenValues given;
    flatten(
        parse_yaml(text.substr(equals + 1), where), text.substr(0, equals),
        [&](const YAML::Node&) { return where; }, given);
    for (auto& [path, value] : given) {
        values.insert_or_assign(path, value);
    }
}

/// Takes the values that the recipe's keys ask for, and refuses what is left.
class Reader {
  public:
    explicit Reader(GivenValues values) : values_(std::move(values)) {}

    template <typename Body>
    void section(const std::string& name, const Body& body) {
        const std::string outer = prefix_;
        prefix_ = join_path(outer, name);
        known_sections_.insert(prefix_);
        body();
        prefix_ = outer;
    }

    template <typename Value>
    void field(const std::string& name, Value& value, const Rule& rule) {
        const std::string path = join_path(prefix_, name);
        known_.push_back(path);
        const auto given = values_.find(path);
        if (given == values_.end()) {
            return;
        }
        path_ = path;
        given_ = &given->second;
        read(given_->node, value, rule);
        where_[path] = given->second.where;
        values_.erase(given);
    }

    void refuse_what_is_left() const {
        for (const auto& [path, given] : values_) {
            if (known_sections_.contains(path) || path.empty()) {
                if (given.node.IsNull() || given.node.IsMap()) {
                    continue;  // an empty block: all defaults
                }
                throw UsageError(fmt::format("{}: {} is a block of keys, not a value", given.where,
                                             path.empty() ? "a recipe" : path));
            }
            throw UsageError(fmt::format("{}: unknown key {}; did you mean {}?", given.where, path,
                                         nearest_key(path)));
        }
    }

    /// Where a key was given, or empty when it was not.
    [[nodiscard]] std::string where(const std::string& path) const {
        const auto found = where_.find(path);
        return found == where_.end() ? "" : found->second;
    }

  private:
    [[noreturn]] void fail(const std::string& allowed) const {
        YAML::Emitter emitter;
        emitter << YAML::Flow << given_->node;
        throw UsageError(fmt::format("{}: {} is {}, but must be {}", given_->where, path_,
                                     given_->node.IsNull() ? "null" : emitter.c_str(), allowed));
    }

    /// A key of the same last word in another block is nearer than one that is spelled alike.
    [[nodiscard]] std::string nearest_key(const std::string& path) const {
        const auto last_word = [](const std::string& key) {
            return key.substr(key.rfind('.') + 1);
        };
        std::vector<std::string> same_word;
        for (const std::string& key : known_) {
            if (last_word(key) == last_word(path)) {
                same_word.push_back(key);
            }
        }
        return nearest_word(path, same_word.empty() ? known_ : same_word);
    }

    [[nodiscard]] static std::string describe(const Rule& rule, const std::string& type) {
        if (!rule.choices.empty()) {
            return fmt::format("one of {}", fmt::join(rule.choices, ", "));
        }
        std::string text = type;
        if (std::isfinite(rule.minimum)) {
            text += fmt::format(" {} {}", rule.minimum_is_allowed ? "of at least" : "above",
                                rule.minimum);
        }
        if (std::isfinite(rule.maximum)) {
            text += fmt::format(" and {} {}", rule.maximum_is_allowed ? "at most" : "below",
                                rule.maximum);
        }
        return text;
    }

    template <typename Number>
    void read_number(const YAML::Node& node, Number& value, const Rule& rule, const char* type) {
        Number parsed{};
        bool valid = node.IsScalar();
        if (valid) {
            const std::string& text = node.Scalar();
            const auto [end, error] =
                std::from_chars(text.data(), text.data() + text.size(), parsed);
            const auto as_double = static_cast<double>(parsed);
            valid = error == std::errc{} && end == text.data() + text.size() &&
                    std::isfinite(as_double) && as_double >= rule.minimum &&
                    as_double <= rule.maximum &&
                    (rule.minimum_is_allowed || as_double > rule.minimum) &&
                    (rule.maximum_is_allowed || as_double < rule.maximum);
        }
        if (!valid) {
            fail(describe(rule, type));
        }
        value = parsed;
    }

    void read(const YAML::Node& node, int& value, const Rule& rule) {
        read_number(node, value, rule, "a whole number");
    }
    void read(const YAML::Node& node, std::int64_t& value, const Rule& rule) {
        read_number(node, value, rule, "a whole number");
    }
    void read(const YAML::Node& node, double& value, const Rule& rule) {
        read_number(node, value, rule, "a number");
    }
    void read(const YAML::Node& node, bool& value, const Rule& /*rule*/) {
        if (!node.IsScalar() || (node.Scalar() != "true" && node.Scalar() != "false")) {
            fail("true or false");
        }
        value = node.Scalar() == "true";
    }
    void read(const YAML::Node& node, std::string& value, const Rule& rule) {
        const std::string allowed = describe(rule, "text");
        if (!node.IsScalar() || node.Scalar().empty()) {
            fail(allowed);
        }
        if (!rule.choices.empty() && std::find(rule.choices.begin(), rule.choices.end(),
                                               node.Scalar()) == rule.choices.end()) {
            fail(allowed);
        }
        value = node.Scalar();
    }
    template <typename Value>
    void read(const YAML::Node& node, std::optional<Value>& value, const Rule& rule) {
        if (node.IsNull()) {
            value.reset();
            return;
        }
        Value parsed{};
        read(node, parsed, rule);
        value = parsed;
    }
    void read(const YAML::Node& node, std::vector<std::string>& value, const Rule& rule) {
        value.clear();
        if (node.IsScalar()) {
            read(node, value.emplace_back(), rule);
            return;
        }
        if (!node.IsSequence()) {
            fail("a path or a list of paths");
        }
        for (const auto& entry : node) {
            read(entry, value.emplace_back(), rule);
        }
    }
    void read(const YAML::Node& node, std::array<double, 2>& value, const Rule& rule) {
        if (!node.IsSequence() || node.size() != 2) {
            fail("a list of two numbers");
        }
        read(node[0], value[0], rule);
        read(node[1], value[1], rule);
    }

    GivenValues values_;
    std::string prefix_;
    std::string path_;              // of the field that is being read
    const Given* given_ = nullptr;  // its value
    std::vector<std::string> known_;
    std::set<std::string> known_sections_;
    std::map<std::string, std::string> where_;
};

/// Rules over more than one key: nothing that is given may be ignored.
void check_together(const Reader& reader, Recipe& recipe) {
    const auto refuse = [&](const std::string& key, const std::string& reason) {
        if (!reader.where(key).empty()) {
            throw UsageError(fmt::format("{}: {} {}", reader.where(key), key, reason));
        }
    };
    if (recipe.model.path && reader.where("model.preset").empty()) {
        recipe.model.preset.reset();
    }
    if (recipe.model.path && recipe.model.preset) {
        refuse("model.preset",
               "would be ignored, because model.path is given: remove one, or set it to null");
    }
    if (!recipe.model.path && !recipe.model.preset) {
        throw UsageError("model.path and model.preset are both null: give one of them");
    }
    const bool evaluates = recipe.train.eval_every > 0;
    if (evaluates && recipe.data.validation_path.empty()) {
        refuse("train.eval_every", "needs data.validation_path");
    }
    if (!evaluates && !recipe.data.validation_path.empty()) {
        refuse("data.validation_path", "would be ignored, because train.eval_every is 0");
    }
    if (recipe.train.schedule.decay == "constant") {
        refuse("train.schedule.min_lr_ratio", "would be ignored, because the decay is constant");
    }
    if (!recipe.checkpoint.dir) {
        for (const char* key : {"checkpoint.every", "checkpoint.keep", "checkpoint.resume"}) {
            refuse(key, "would be ignored, because checkpoint.dir is not given");
        }
    }
    const std::int64_t rows = recipe.train.micro_batch_size * recipe.train.accelerator.dp;
    if (recipe.train.global_batch_size % rows != 0) {
        throw UsageError(fmt::format(
            "train.global_batch_size {} is not a multiple of micro_batch_size {} times dp {}: "
            "the nearest that is: {}",
            recipe.train.global_batch_size, recipe.train.micro_batch_size,
            recipe.train.accelerator.dp,
            std::max<std::int64_t>(1, (recipe.train.global_batch_size + rows / 2) / rows) * rows));
    }
}
}  // namespace

Recipe parse_recipe(const std::string& text,
                    const std::string& name,
                    const std::vector<std::string>& overrides) {
    GivenValues values;
    flatten(
        parse_yaml(text, name), "",
        [&](const YAML::Node& node) { return fmt::format("{}:{}", name, node.Mark().line + 1); },
        values);
    for (const std::string& override_text : overrides) {
        apply_override(override_text, values);
    }
    Reader reader(std::move(values));
    Recipe recipe;
    recipe_fields::visit_recipe(reader, recipe);
    reader.refuse_what_is_left();
    check_together(reader, recipe);
    return recipe;
}

Recipe load_recipe(const std::string& path, const std::vector<std::string>& overrides) {
    return parse_recipe(read_file(path), path, overrides);
}

}  // namespace hybridcp
