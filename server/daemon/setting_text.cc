#include "server/daemon/setting_text.h"

#include <google/protobuf/text_format.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/daemon/default_config.h"

namespace epikv {

namespace pb = google::protobuf;

v1::ServerConfig ParseText(const std::string& text, const std::string& where, Problems& problems) {
  v1::ServerConfig config;
  ProblemCollector collector(where, problems);
  pb::TextFormat::Parser parser;
  parser.RecordErrorsTo(&collector);
  parser.AllowUnknownField(true);
  parser.ParseFromString(text, &config);
  return config;
}

v1::ServerConfig DefaultConfig() {
  Problems problems;
  return ParseText(kDefaultConfig, "defaults", problems);
}

const std::vector<Setting>& AllSettings() {
  static const auto& settings = *[] {
    auto* all = new std::vector<Setting>;
    std::vector<std::string> comment;
    for (absl::string_view line : absl::StrSplit(kDefaultConfig, '\n')) {
      if (absl::ConsumePrefix(&line, "#")) {
        comment.push_back(std::string(absl::StripPrefix(line, " ")));
        continue;
      }
      const std::string name(line.substr(0, line.find(':')));
      const pb::FieldDescriptor* field = v1::ServerConfig::descriptor()->FindFieldByName(name);
      if (field != nullptr) all->push_back({field, comment});
      comment.clear();
    }
    return all;
  }();
  return settings;
}

std::string ValueText(const v1::ServerConfig& config, const pb::FieldDescriptor& field) {
  pb::TextFormat::Printer printer;
  printer.SetSingleLineMode(true);
  std::string text;
  if (!field.is_repeated()) {
    printer.PrintFieldValueToString(config, &field, -1, &text);
    return text;
  }
  std::vector<std::string> items(config.GetReflection()->FieldSize(config, &field));
  for (size_t i = 0; i < items.size(); ++i) {
    printer.PrintFieldValueToString(config, &field, static_cast<int>(i), &items[i]);
    items[i] = absl::StrCat("{ ", items[i], "}");
  }
  return absl::StrCat("[", absl::StrJoin(items, ", "), "]");
}

}  // namespace epikv
