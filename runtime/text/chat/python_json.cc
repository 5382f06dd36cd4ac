#include "runtime/text/chat/python_json.h"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

constexpr size_t kMostJsonDepth = 64, kMostJsonBytes = 16 << 20;

// Writes what the parser finds.
class JsonWriter : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit JsonWriter(std::optional<int> indent) : indent_(indent) {}

  bool null() override { return Value("null"); }
  bool boolean(bool value) override { return Value(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return Value(absl::StrCat(value)); }
  bool number_unsigned(number_unsigned_t value) override { return Value(absl::StrCat(value)); }
  bool number_float(number_float_t, const string_t& spelt) override { return Value(spelt); }
  bool string(string_t& text) override { return Value(PythonJsonString(text)); }
  bool binary(binary_t&) override { return false; }

  bool start_object(size_t) override { return Begin('{'); }
  bool end_object() override { return End('}'); }
  bool start_array(size_t) override { return Begin('['); }
  bool end_array() override { return End(']'); }

  bool key(string_t& name) override {
    Level& level = levels_.back();
    if (!level.keys.insert(name).second)
      return Refuse(absl::StrCat("has the key '", name, "' twice"));
    Separate(level);
    absl::StrAppend(&text_, PythonJsonString(name), ": ");
    level.after_key = true;
    return true;
  }

  bool parse_error(size_t byte, const std::string&, const nlohmann::detail::exception&) override {
    return Refuse(absl::StrCat("is no JSON at byte ", byte));
  }

  absl::StatusOr<std::string> Take() {
    if (!status_.ok()) return status_;
    return std::move(text_);
  }

 private:
  struct Level {
    bool empty = true;
    bool after_key = false;
    std::set<std::string> keys;
  };

  void Separate(Level& level) {
    if (!level.empty) text_ += indent_.has_value() ? "," : ", ";
    level.empty = false;
    NewLine();
  }
  void NewLine() {
    if (indent_.has_value())
      absl::StrAppend(&text_, "\n", std::string(*indent_ * levels_.size(), ' '));
  }
  void Place() {
    if (levels_.empty()) return;
    Level& level = levels_.back();
    if (!std::exchange(level.after_key, false)) Separate(level);
  }
  bool Value(absl::string_view text) {
    Place();
    absl::StrAppend(&text_, text);
    if (text_.size() > kMostJsonBytes) {
      return Refuse(absl::StrCat("is longer than ", kMostJsonBytes >> 20, " MiB as it is written"));
    }
    return true;
  }
  bool Begin(char bracket) {
    if (levels_.size() == kMostJsonDepth) {
      return Refuse(absl::StrCat("is nested deeper than ", kMostJsonDepth));
    }
    if (!Value(absl::string_view(&bracket, 1))) return false;
    levels_.emplace_back();
    return true;
  }
  bool End(char bracket) {
    const bool empty = levels_.back().empty;
    levels_.pop_back();
    if (!empty) NewLine();
    text_ += bracket;
    return true;
  }
  bool Refuse(absl::string_view why) {
    status_ = absl::InvalidArgumentError(why);
    return false;
  }

  const std::optional<int> indent_;
  std::string text_;
  std::vector<Level> levels_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<std::string> PythonJson(absl::string_view json, std::optional<int> indent) {
  JsonWriter writer(indent);
  nlohmann::json::sax_parse(json.begin(), json.end(), &writer);
  return writer.Take();
}

std::string PythonJsonString(absl::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', /*ensure_ascii=*/false,
                                   nlohmann::json::error_handler_t::replace);
}

}  // namespace epikv
