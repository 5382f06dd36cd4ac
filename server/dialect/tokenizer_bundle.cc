#include "server/dialect/tokenizer_bundle.h"

#include <zlib.h>

#include <cstdint>

#include "nlohmann/json.hpp"

namespace epikv {
namespace {

void Add16(uint32_t value, std::string& out) {
  out.push_back(static_cast<char>(value & 0xff));
  out.push_back(static_cast<char>(value >> 8 & 0xff));
}
void Add32(uint32_t value, std::string& out) {
  Add16(value, out);
  Add16(value >> 16, out);
}

// What the local header of a file and its entry in the directory have in common, from the version
// that is needed to the length of the extra field.
void AddFacts(const BundledFile& file, std::string& out) {
  constexpr uint32_t kVersion = 20, kUtf8Names = 1 << 11, kStored = 0;
  constexpr uint32_t kTime = 0, kDate = 1 << 5 | 1;  // 1 January 1980, the first that ZIP has
  const auto size = static_cast<uint32_t>(file.bytes.size());
  const auto crc = crc32_z(0, reinterpret_cast<const Bytef*>(file.bytes.data()), file.bytes.size());
  Add16(kVersion, out);
  Add16(kUtf8Names, out);
  Add16(kStored, out);
  Add16(kTime, out);
  Add16(kDate, out);
  Add32(static_cast<uint32_t>(crc), out);
  Add32(size, out);  // compressed
  Add32(size, out);
  Add16(static_cast<uint32_t>(file.name.size()), out);
  Add16(0, out);  // no extra field
}

}  // namespace

std::string ZipOf(absl::Span<const BundledFile> files) {
  constexpr uint32_t kLocalHeader = 0x04034b50, kEntry = 0x02014b50, kEnd = 0x06054b50;
  std::string archive, directory;
  for (const BundledFile& file : files) {
    Add32(kEntry, directory);
    Add16(20, directory);  // the version that made it
    AddFacts(file, directory);
    Add16(0, directory);  // no comment
    Add16(0, directory);  // the first disk
    Add16(0, directory);  // internal attributes
    Add32(0, directory);  // external attributes
    Add32(static_cast<uint32_t>(archive.size()), directory);
    directory += file.name;
    Add32(kLocalHeader, archive);
    AddFacts(file, archive);
    archive += file.name;
    archive.append(file.bytes.data(), file.bytes.size());
  }
  const auto begin = static_cast<uint32_t>(archive.size());
  const auto count = static_cast<uint32_t>(files.size());
  archive += directory;
  Add32(kEnd, archive);
  Add16(0, archive);  // this disk
  Add16(0, archive);  // the disk of the directory
  Add16(count, archive);
  Add16(count, archive);
  Add32(static_cast<uint32_t>(directory.size()), archive);
  Add32(begin, archive);
  Add16(0, archive);  // no comment
  return archive;
}

std::string TokenizerBundle(const ServedModel& model) {
  const std::string generation =
      nlohmann::ordered_json{{"eos_token_id", model.admission->manifest().eos_tokens}}.dump();
  std::vector<BundledFile> files = {{"tokenizer.json", model.tokenizer->json()},
                                    {"generation_config.json", generation}};
  // Text that the exporter wrote, in a file that the operator chose: what is not as it should be is
  // left out.
  const auto chat = nlohmann::ordered_json::parse(model.chat_template_json, nullptr,
                                                  /*allow_exceptions=*/false);
  std::string source, tokens;
  if (chat.is_object() && chat.contains("template") && chat["template"].is_string()) {
    source = chat["template"].get<std::string>();
    files.push_back({"chat_template.jinja", source});
    if (chat.contains("special_tokens")) {
      tokens = chat["special_tokens"].dump();
      files.push_back({"tokenizer_config.json", tokens});
    }
  }
  return ZipOf(files);
}

}  // namespace epikv
