#include "runtime/model/manifest.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace epikv {
namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "epikv.model/1";
constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();

// "epikv.model/2", say.
bool IsLater(const Json& format) {
  constexpr absl::string_view kName = "epikv.model/";
  if (!format.is_string()) return false;
  const std::string& text = format.get_ref<const std::string&>();
  int64_t version = 0;
  return absl::StartsWith(text, kName) &&
         absl::SimpleAtoi(absl::string_view(text).substr(kName.size()), &version) && version > 1;
}

// A value for an error message.
std::string Shown(const Json& value) {
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";
  constexpr size_t kMost = 40;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kMost) text = text.substr(0, kMost) + "...";
  return text;
}

// Everything that is wrong with a manifest.
class ManifestViolations {
 public:
  void Add(std::string violation) { all_.push_back(std::move(violation)); }
  absl::Status ToStatus() const {
    if (all_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("manifest: ", absl::StrJoin(all_, "; ")));
  }

 private:
  std::vector<std::string> all_;
};

// Reads the fields of one JSON object. Every field must be there, null where that means
// something: a misspelt name would otherwise pass as an unknown one. A reader gives nothing for
// a bad field and adds it to the violations.
class Fields {
 public:
  // path: where the object lies, "" or ending in a dot. Both references outlive the reader.
  Fields(const Json& object, std::string path, ManifestViolations& violations)
      : object_(object), path_(std::move(path)), violations_(violations) {}

  void Refuse(absl::string_view name, absl::string_view what) {
    violations_.Add(absl::StrCat(path_, name, " ", what));
  }

  // For what older files lack.
  bool Has(const char* name) const { return object_.contains(name); }
  bool IsNull(const char* name) const { return object_.contains(name) && object_[name].is_null(); }

  // Not empty.
  std::optional<std::string> String(const char* name) {
    const Json* value = Find(name);
    if (value == nullptr) return std::nullopt;
    if (value->is_string() && !value->get_ref<const std::string&>().empty()) {
      return value->get<std::string>();
    }
    return Bad(name, "must be a string, not empty");
  }

  std::optional<bool> Bool(const char* name) {
    const Json* value = Find(name);
    if (value == nullptr) return std::nullopt;
    if (value->is_boolean()) return value->get<bool>();
    return Bad(name, "must be true or false");
  }

  std::optional<int64_t> Int(const char* name, int64_t min, int64_t max) {
    const Json* value = Find(name);
    if (value == nullptr) return std::nullopt;
    if (IsIntIn(*value, min, max)) return value->get<int64_t>();
    return Bad(name, absl::StrCat("must be an integer in [", min, ", ", max, "]"));
  }

  std::vector<int32_t> TokenIds(const char* name, int64_t vocab_size) {
    const Json* list = List(name);
    std::vector<int32_t> ids;
    if (list == nullptr) return ids;
    for (const Json& id : *list) {
      if (IsIntIn(id, 0, vocab_size - 1)) {
        ids.push_back(id.get<int32_t>());
      } else {
        Bad(name, absl::StrCat("must hold integers in [0, ", vocab_size - 1, "]"));
        break;
      }
    }
    return ids;
  }

  std::optional<float> Number(const char* name, float min, float max) {
    const Json* value = Find(name);
    if (value == nullptr) return std::nullopt;
    if (value->is_number() && value->get<float>() >= min && value->get<float>() <= max) {
      return value->get<float>();
    }
    return Bad(name, absl::StrCat("must be a number in [", min, ", ", max, "]"));
  }

  // Finite and above 0.
  std::optional<double> Positive(const char* name) {
    const Json* value = Find(name);
    if (value == nullptr) return std::nullopt;
    if (value->is_number() && std::isfinite(value->get<double>()) && value->get<double>() > 0) {
      return value->get<double>();
    }
    return Bad(name, "must be a number above 0");
  }

  // Finite and not negative.
  std::vector<double> Numbers(const char* name) {
    const Json* list = List(name);
    std::vector<double> numbers;
    if (list == nullptr) return numbers;
    for (const Json& item : *list) {
      if (item.is_number() && std::isfinite(item.get<double>()) && item.get<double>() >= 0) {
        numbers.push_back(item.get<double>());
      } else {
        Bad(name, "must hold numbers, none negative");
        break;
      }
    }
    return numbers;
  }

  // A reader of the field; nothing if it is no object.
  std::optional<Fields> Object(const char* name) {
    const Json* value = Find(name);
    if (value == nullptr) return std::nullopt;
    if (value->is_object()) return Fields(*value, absl::StrCat(path_, name, "."), violations_);
    return Bad(name, "must be an object");
  }

  // Readers of the objects in a list, which must not be empty.
  std::vector<Fields> Objects(const char* name) {
    std::vector<Fields> readers;
    const Json* list = List(name);
    if (list == nullptr) return readers;
    if (list->empty()) Refuse(name, "must not be empty");
    for (size_t i = 0; i < list->size(); ++i) {
      const std::string item = absl::StrCat(name, "[", i, "]");
      if (!(*list)[i].is_object()) Refuse(item, "must be an object");
      readers.push_back(Fields((*list)[i], absl::StrCat(path_, item, "."), violations_));
    }
    return readers;
  }

 private:
  static bool IsIntIn(const Json& value, int64_t min, int64_t max) {
    if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(kLargest)) {
      return false;
    }
    return value.is_number_integer() && value.get<int64_t>() >= min && value.get<int64_t>() <= max;
  }

  // Null, and a violation, if there is none.
  const Json* Find(const char* name) {
    if (!object_.is_object()) return nullptr;  // which has been refused as a whole
    const auto found = object_.find(name);
    if (found != object_.end()) return &*found;
    Refuse(name, "is missing");
    return nullptr;
  }

  // Null, and a violation, if it is no list.
  const Json* List(const char* name) {
    const Json* value = Find(name);
    if (value == nullptr || value->is_array()) return value;
    Bad(name, "must be a list");
    return nullptr;
  }

  std::nullopt_t Bad(const char* name, absl::string_view what) {
    Refuse(name, absl::StrCat(what, ", is ", Shown(object_[name])));
    return std::nullopt;
  }

  const Json& object_;
  const std::string path_;
  ManifestViolations& violations_;
};

Rope ReadRope(Fields& fields) {
  Rope rope;
  const std::string layout = fields.String("layout").value_or("half");
  if (layout != "half" && layout != "interleaved") {
    fields.Refuse("layout", absl::StrCat("must be half or interleaved, is ", layout));
  }
  rope.layout = layout == "interleaved" ? Rope::Layout::kInterleaved : Rope::Layout::kHalf;
  rope.inv_freq = fields.Numbers("inv_freq");
  rope.attention_factor = fields.Positive("attention_factor").value_or(1);
  return rope;
}

LayerFacts ReadLayer(Fields& fields, const std::vector<Rope>& ropes) {
  LayerFacts layer;
  layer.key_width = fields.Int("key_width", 1, kLargest).value_or(0);
  layer.value_width = fields.Int("value_width", 1, kLargest).value_or(0);
  layer.scale = fields.Positive("scale").value_or(0);
  if (!fields.IsNull("soft_cap")) layer.soft_cap = fields.Positive("soft_cap");
  if (!fields.IsNull("window")) layer.window = fields.Int("window", 1, kLargest);
  layer.output_projection = fields.String("output_projection").value_or("");
  // Without ropes, whose lack has been refused, any index will do.
  const int64_t last_rope = ropes.empty() ? kLargest : static_cast<int64_t>(ropes.size()) - 1;
  const std::optional<int64_t> rope = fields.Int("rope", 0, last_rope);
  if (!rope.has_value() || ropes.empty()) return layer;
  layer.rope = *rope;
  const int64_t rotary_width = 2 * static_cast<int64_t>(ropes[*rope].inv_freq.size());
  if (layer.key_width > 0 && rotary_width > layer.key_width) {
    fields.Refuse("rope", absl::StrCat("rotates ", rotary_width, " channels of a key that has ",
                                       layer.key_width));
  }
  return layer;
}

FinalNorm ReadFinalNorm(Fields& fields) {
  FinalNorm norm;
  norm.weight = fields.String("weight").value_or("");
  norm.eps = fields.Positive("eps").value_or(0);
  norm.wide = fields.Bool("wide").value_or(false);
  constexpr float kMost = std::numeric_limits<float>::max();
  norm.offset = fields.Number("offset", -kMost, kMost).value_or(0);
  return norm;
}

Calibration ReadCalibration(Fields& fields, int64_t num_layers) {
  Calibration calibration;
  // A step needs the layer after it, too. Without layers, refused elsewhere, any will do.
  const int64_t last = num_layers == 0 ? kLargest : num_layers - 2;
  calibration.policy = fields.String("policy").value_or("");
  const std::optional<int64_t> layer_a = fields.Int("layer_a", 0, last);
  const std::optional<int64_t> layer_b = fields.Int("layer_b", 0, last);
  if (layer_a.has_value() && layer_a == layer_b) fields.Refuse("layer_b", "must not be layer_a");
  calibration.layer_a = layer_a.value_or(0);
  calibration.layer_b = layer_b.value_or(0);
  calibration.sign = fields.Int("sign", -1, 1).value_or(1);
  if (calibration.sign == 0) fields.Refuse("sign", "must be 1 or -1, is 0");
  calibration.window = fields.Int("window", 2, kLargest).value_or(0);
  calibration.confirmed = fields.Bool("confirmed").value_or(false);
  return calibration;
}

// Every field may be missing.
SamplingParams ReadSampling(Fields& fields) {
  constexpr float kSmallest = std::numeric_limits<float>::min();
  SamplingParams sampling;
  auto number = [&](const char* name, float min, float max) {
    return fields.Has(name) ? fields.Number(name, min, max) : std::nullopt;
  };
  sampling.temperature = number("temperature", 0, std::numeric_limits<float>::max());
  sampling.top_p = number("top_p", kSmallest, 1);
  if (fields.Has("top_k")) {
    sampling.top_k = static_cast<int32_t>(fields.Int("top_k", 0, kLargest).value_or(0));
  }
  sampling.min_p = number("min_p", 0, 1);
  sampling.typical_p = number("typical_p", kSmallest, 1);
  sampling.repetition_penalty = number("repetition_penalty", 0.01f, 100);
  return sampling;
}

// The KV pool has one row width. A width that is no width (0) has been refused already.
void CheckWidths(Fields& fields, const std::vector<LayerFacts>& layers) {
  for (const auto& [name, width] : {std::pair("key_width", &LayerFacts::key_width),
                                    std::pair("value_width", &LayerFacts::value_width)}) {
    std::set<int64_t> widths;
    for (const LayerFacts& layer : layers) {
      if (layer.*width > 0) widths.insert(layer.*width);
    }
    if (widths.size() < 2) continue;
    fields.Refuse("layers", absl::StrCat("must all have the same ", name, ", they have ",
                                         absl::StrJoin(widths, ", ")));
  }
}

std::optional<DType> DTypeNamed(absl::string_view name) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return std::nullopt;
}

// What is said of the model as a whole.
Manifest ReadModel(Fields& fields) {
  Manifest m;
  m.name = fields.String("name").value_or("");
  m.architecture = fields.String("architecture").value_or("");
  const std::string name = fields.String("dtype").value_or("float32");
  const std::optional<DType> dtype = DTypeNamed(name);
  if (!dtype.has_value()) {
    fields.Refuse("dtype", absl::StrCat("must be float32, bfloat16 or float16, is ", name));
  }
  m.dtype = dtype.value_or(DType::kFloat32);
  if (fields.Has("weights") && !fields.IsNull("weights"))
    m.weights = fields.String("weights").value_or("");
  if (fields.Has("quantization") && !fields.IsNull("quantization")) {
    m.quantization = fields.String("quantization").value_or("int8");
    if (m.quantization != "int8" && m.quantization != "int4") {
      fields.Refuse("quantization",
                    absl::StrCat("must be int8, int4 or null, is ", m.quantization));
    }
  }
  m.vocab_size = fields.Int("vocab_size", 1, kLargest).value_or(kLargest);
  m.context_length = fields.Int("context_length", 1, kLargest).value_or(1);
  m.hidden_size = fields.Int("hidden_size", 1, kLargest).value_or(1);
  m.num_heads = fields.Int("num_heads", 1, kLargest).value_or(0);
  m.num_kv_heads = fields.Int("num_kv_heads", 1, kLargest).value_or(1);
  if (m.num_heads % m.num_kv_heads != 0) {
    fields.Refuse("num_heads", absl::StrCat("must be a multiple of num_kv_heads, is ", m.num_heads,
                                            " with ", m.num_kv_heads));
  }
  if (!fields.IsNull("bos_token_id")) {
    const std::optional<int64_t> bos = fields.Int("bos_token_id", 0, m.vocab_size - 1);
    if (bos.has_value()) m.bos_token = static_cast<int32_t>(*bos);
  }
  m.eos_tokens = fields.TokenIds("eos_token_ids", m.vocab_size);
  return m;
}

}  // namespace

absl::StatusOr<Manifest> Manifest::Parse(absl::string_view json) {
  const Json file = Json::parse(json.begin(), json.end(), nullptr, /*allow_exceptions=*/false);
  if (!file.is_object()) return absl::InvalidArgumentError("manifest: not a JSON object");
  const Json format = file.value("format", Json());
  if (IsLater(format)) {
    return absl::InvalidArgumentError(
        absl::StrCat("manifest: the model file was made by a later version of epikv (format ",
                     Shown(format), "); this version reads ", kFormat));
  }
  if (format != kFormat) {
    return absl::InvalidArgumentError(
        absl::StrCat("manifest: format must be \"", kFormat, "\", is ", Shown(format)));
  }
  ManifestViolations violations;
  Fields fields(file, "", violations);
  Manifest m = ReadModel(fields);
  for (Fields& rope : fields.Objects("ropes")) m.ropes.push_back(ReadRope(rope));
  for (Fields& layer : fields.Objects("layers")) m.layers.push_back(ReadLayer(layer, m.ropes));
  CheckWidths(fields, m.layers);
  if (fields.Has("final_norm") && !fields.IsNull("final_norm")) {  // older files have none
    std::optional<Fields> norm = fields.Object("final_norm");
    if (norm.has_value()) m.final_norm = ReadFinalNorm(*norm);
  }
  if (!fields.IsNull("calibration")) {
    std::optional<Fields> calibration = fields.Object("calibration");
    if (calibration.has_value()) m.calibration = ReadCalibration(*calibration, m.num_layers());
  }
  if (fields.Has("sampling") && !fields.IsNull("sampling")) {  // older files have none
    std::optional<Fields> sampling = fields.Object("sampling");
    if (sampling.has_value()) m.sampling = ReadSampling(*sampling);
  }
  const absl::Status status = violations.ToStatus();
  if (!status.ok()) return status;
  return m;
}

}  // namespace epikv
