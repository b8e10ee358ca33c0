#include <yaml-cpp/yaml.h>

#include "train/recipe.h"
#include "train/recipe_fields.h"

namespace hybridcp {

namespace {

class Writer {
  public:
    Writer() { emitter_ << YAML::BeginMap; }

    template <typename Body>
    void section(const std::string& name, const Body& body) {
        emitter_ << YAML::Key << name << YAML::Value << YAML::BeginMap;
        body();
        emitter_ << YAML::EndMap;
    }

    template <typename Value>
    void field(const std::string& name, const Value& value, const recipe_fields::Rule& /*rule*/) {
        emitter_ << YAML::Key << name << YAML::Value;
        write(value);
    }

    [[nodiscard]] std::string text() {
        emitter_ << YAML::EndMap;
        return std::string(emitter_.c_str()) + "\n";
    }

  private:
    void write(bool value) { emitter_ << value; }
    void write(int value) { emitter_ << value; }
    void write(std::int64_t value) { emitter_ << value; }
    void write(double value) { emitter_ << fmt::format("{}", value); }  // shortest that reads back
    void write(const std::string& value) { emitter_ << value; }
    template <typename Value>
    void write(const std::optional<Value>& value) {
        if (value) {
            write(*value);
        } else {
            emitter_ << YAML::Null;
        }
    }
    template <typename List>
    void write_list(const List& list) {
        emitter_ << YAML::Flow << YAML::BeginSeq;
        for (const auto& entry : list) {
            write(entry);
        }
        emitter_ << YAML::EndSeq;
    }
    void write(const std::vector<std::string>& list) { write_list(list); }
    void write(const std::array<double, 2>& list) { write_list(list); }

    YAML::Emitter emitter_;
};
}  // namespace

std::string to_yaml(const Recipe& recipe) {
    Recipe copy = recipe;  // the visitor takes a mutable one, for the reader's sake
    Writer writer;
    recipe_fields::visit_recipe(writer, copy);
    return writer.text();
}

std::uint64_t recipe_hash(const Recipe& recipe) {
    std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
    for (const char c : to_yaml(recipe)) {
        hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
    }
    return hash;
}

}  // namespace hybridcp
