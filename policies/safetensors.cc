#include "policies/safetensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace epikv {
namespace {

using Json = nlohmann::json;

constexpr int kDepth = 3;  // of the header: facts of an array are lists

absl::Status Bad(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("not a safetensors file: ", what));
}

// IEEE half: 1 sign bit, 5 of exponent, 10 of fraction.
float FromHalf(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float small = std::ldexp(static_cast<float>(fraction), -24);
  return sign != 0 ? -small : small;
}

float FromBfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

template <class T>
T At(absl::string_view bytes, size_t place) {
  T value;
  std::memcpy(&value, bytes.data() + place * sizeof(T), sizeof(T));
  return value;
}

enum class Type { kF32, kF16, kBf16 };

std::optional<Type> TypeOf(const Json& name) {
  if (name == "F32") return Type::kF32;
  if (name == "F16") return Type::kF16;
  if (name == "BF16") return Type::kBf16;
  return std::nullopt;
}

int64_t ElementBytes(Type type) { return type == Type::kF32 ? 4 : 2; }

// A count or an offset; nothing if it is none that a file could hold.
std::optional<int64_t> CountOf(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto count = value.get<uint64_t>();
  if (count > uint64_t{1} << 48) return std::nullopt;
  return static_cast<int64_t>(count);
}

struct Entry {
  Type type = Type::kF32;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // bytes, from the end of the header
};

// Null if there is none.
const Json& FactOf(const Json& facts, const char* name) {
  static const Json& none = *new Json();
  const auto found = facts.find(name);
  return found == facts.end() ? none : *found;
}

absl::StatusOr<Entry> EntryOf(const Json& facts, int64_t data_bytes) {
  if (!facts.is_object()) return Bad("is no object");
  Entry entry;
  const std::optional<Type> type = TypeOf(FactOf(facts, "dtype"));
  if (!type.has_value()) return Bad("dtype must be F32, F16 or BF16");
  entry.type = *type;
  const Json& shape = FactOf(facts, "shape");
  if (!shape.is_array()) return Bad("shape must be a list");
  int64_t bytes = ElementBytes(*type);
  for (const Json& size : shape) {
    const std::optional<int64_t> count = CountOf(size);
    if (!count.has_value()) return Bad("shape must be of counts");
    if (*count != 0 && bytes > data_bytes / *count) return Bad("shape says more than there is");
    bytes *= *count;
    entry.shape.push_back(*count);
  }
  const Json& offsets = FactOf(facts, "data_offsets");
  const std::optional<int64_t> begin =
      offsets.is_array() && offsets.size() == 2 ? CountOf(offsets[0]) : std::nullopt;
  const std::optional<int64_t> end = begin.has_value() ? CountOf(offsets[1]) : std::nullopt;
  if (!end.has_value() || *begin > *end || *end > data_bytes) {
    return Bad("data_offsets are not within the file");
  }
  if (*end - *begin != bytes) return Bad("data_offsets and shape disagree");
  entry.begin = *begin;
  entry.end = *end;
  return entry;
}

absl::StatusOr<NamedArray> ArrayOf(const Entry& entry, absl::string_view data) {
  const absl::string_view bytes = data.substr(entry.begin, entry.end - entry.begin);
  NamedArray array{.shape = entry.shape, .values = {}};
  const int64_t count = std::ssize(bytes) / ElementBytes(entry.type);
  array.values.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    const float value = entry.type == Type::kF32   ? At<float>(bytes, i)
                        : entry.type == Type::kF16 ? FromHalf(At<uint16_t>(bytes, i))
                                                   : FromBfloat16(At<uint16_t>(bytes, i));
    if (!std::isfinite(value)) {
      return absl::InvalidArgumentError(absl::StrCat("number ", i, " is not finite"));
    }
    array.values.push_back(value);
  }
  return array;
}

}  // namespace

absl::StatusOr<Safetensors> ReadSafetensors(absl::string_view bytes) {
  static_assert(std::endian::native == std::endian::little);
  if (bytes.size() < 8) return Bad("it ends before its header");
  const auto header_bytes = At<uint64_t>(bytes, 0);
  if (header_bytes > bytes.size() - 8) return Bad("it ends before its header does");
  const absl::string_view text = bytes.substr(8, header_bytes),
                          data = bytes.substr(8 + header_bytes);
  // Of objects in an object; and each name once, or the last would be taken.
  std::set<std::string> names;
  bool twice = false;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::key && depth == 1) {
      twice |= !names.insert(parsed.get<std::string>()).second;
    }
    return depth <= kDepth;
  };
  const Json header = Json::parse(text.begin(), text.end(), watch, /*allow_exceptions=*/false);
  if (!header.is_object()) return Bad("its header is no JSON object");
  if (twice) return Bad("it has two arrays of one name");
  Safetensors file;
  std::vector<std::pair<int64_t, int64_t>> taken;
  for (const auto& [name, facts] : header.items()) {
    if (name == "__metadata__") {
      for (const auto& [key, value] : facts.items()) {
        if (value.is_string()) file.metadata[key] = value.get<std::string>();
      }
      continue;
    }
    const absl::StatusOr<Entry> entry = EntryOf(facts, std::ssize(data));
    if (!entry.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(name, ": ", entry.status().message()));
    }
    absl::StatusOr<NamedArray> array = ArrayOf(*entry, data);
    if (!array.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(name, ": ", array.status().message()));
    }
    taken.emplace_back(entry->begin, entry->end);
    file.arrays.emplace(name, *std::move(array));
  }
  std::sort(taken.begin(), taken.end());
  int64_t end = 0;
  for (const auto& [begin, next] : taken) {
    if (begin != end) return Bad("its arrays overlap or leave room between them");
    end = next;
  }
  if (end != std::ssize(data)) return Bad("bytes are left over");
  return file;
}

}  // namespace epikv
