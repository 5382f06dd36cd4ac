#include "server/daemon/command_line.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/text_format.h>

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "runtime/text/edit_distance.h"
#include "server/base/file_contents.h"
#include "server/daemon/config_checks.h"
#include "server/daemon/setting_text.h"

namespace epikv {
namespace {

namespace pb = google::protobuf;

std::string UnknownFlag(absl::string_view name) {
  std::vector<std::string> close;
  for (const Setting& setting : AllSettings()) {
    const std::string& known = setting.field->name();
    if (IsClose(name, known)) close.push_back(absl::StrCat("--", known));
  }
  return absl::StrCat("unknown flag --", name,
                      close.empty()
                          ? "; --help lists all"
                          : absl::StrCat("; did you mean ", absl::StrJoin(close, ", "), "?"));
}

// A flag as it was given.
struct Flag {
  std::string name;
  std::optional<std::string> value;
};

// The command line, sorted out.
struct Arguments {
  bool help = false, version = false, print_config = false;
  std::optional<std::string> file;
  std::vector<Flag> flags;
};

bool TakesValue(const std::string& name) {
  if (name == "config") return true;
  const auto* field = v1::ServerConfig::descriptor()->FindFieldByName(name);
  return field != nullptr && field->cpp_type() != pb::FieldDescriptor::CPPTYPE_BOOL;
}

Arguments SortArguments(absl::Span<const std::string> args, Problems& problems) {
  Arguments sorted;
  for (size_t i = 0; i < args.size(); ++i) {
    absl::string_view arg = args[i];
    if (!absl::ConsumePrefix(&arg, "--")) {
      problems.push_back(
          absl::StrCat("'", args[i], "' is not a flag; write a setting as --name=value"));
      continue;
    }
    const std::pair<std::string, std::string> split = absl::StrSplit(arg, absl::MaxSplits('=', 1));
    Flag flag{.name = absl::StrReplaceAll(split.first, {{"-", "_"}})};
    if (absl::StrContains(arg, '=')) flag.value = split.second;
    const bool needs_value = TakesValue(flag.name) && !flag.value.has_value();
    if (needs_value && i + 1 == args.size()) {
      problems.push_back(absl::StrCat("--", flag.name, " needs a value"));
      continue;
    }
    if (needs_value) flag.value = args[++i];
    if (flag.name == "help") {
      sorted.help = true;
    } else if (flag.name == "version") {
      sorted.version = true;
    } else if (flag.name == "print_config") {
      sorted.print_config = true;
    } else if (flag.name == "config") {
      sorted.file = flag.value;
    } else {
      sorted.flags.push_back(std::move(flag));
    }
  }
  return sorted;
}

void ApplyFile(const std::string& path, v1::ServerConfig& config, Problems& problems) {
  const absl::StatusOr<FileContents> file = ReadFile(path);
  if (!file.ok()) {
    problems.push_back(absl::StrCat("--config: ", file.status().message()));
    return;
  }
  config.MergeFrom(ParseText(file->text, path, problems));
}

// What the value of a number has to be; empty: the field is none. The parser of text format would
// say what it expected of the text's parts.
absl::string_view NumberRule(const pb::FieldDescriptor& field) {
  if (field.is_repeated()) return "";
  switch (field.cpp_type()) {
    case pb::FieldDescriptor::CPPTYPE_UINT32:
      return "a whole number of 0 to 4294967295";
    case pb::FieldDescriptor::CPPTYPE_UINT64:
      return "a whole number of 0 to 2^64 - 1";
    case pb::FieldDescriptor::CPPTYPE_DOUBLE:
      return "a number";
    default:
      return "";
  }
}

// "8GiB" as a number of bytes; other text as it is.
std::string BytesOf(absl::string_view text) {
  for (const auto& [unit, shift] :
       {std::pair<absl::string_view, int>{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}}) {
    absl::string_view digits = text;
    uint64_t count = 0;
    if (absl::ConsumeSuffix(&digits, unit) && absl::SimpleAtoi(digits, &count) &&
        count <= UINT64_MAX >> shift) {
      return absl::StrCat(count << shift);
    }
  }
  return std::string(text);
}

void ApplyFlag(const Flag& flag, v1::ServerConfig& config, Problems& problems) {
  const auto* field = v1::ServerConfig::descriptor()->FindFieldByName(flag.name);
  if (field == nullptr) {
    problems.push_back(UnknownFlag(flag.name));
    return;
  }
  std::string text = flag.value.value_or("true");
  const bool bytes = absl::EndsWith(flag.name, "_bytes");
  if (bytes) text = BytesOf(text);
  if (field->cpp_type() == pb::FieldDescriptor::CPPTYPE_STRING) {
    text = absl::StrCat("\"", absl::CEscape(text), "\"");
  }
  if (field->cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE) {
    text = absl::StrCat("{", text, "}");
  }
  ProblemCollector collector(absl::StrCat("--", flag.name), problems);
  pb::TextFormat::Parser parser;
  parser.RecordErrorsTo(&collector);
  const size_t known = problems.size();
  if (parser.ParseFieldValueFromString(text, field, &config)) return;
  const std::string is = absl::StrCat(", is \"", absl::CEscape(flag.value.value_or("")), "\"");
  if (const absl::string_view must = NumberRule(*field); !must.empty()) {
    problems.resize(known);
    problems.push_back(
        absl::StrCat("--", flag.name, " must be ", must, bytes ? " (or as 512MiB, 8GiB)" : "", is));
  } else if (problems.size() == known) {  // what follows a value fails without an error
    problems.push_back(absl::StrCat("--", flag.name, " must be one value", is));
  }
}

PrintConfig ToPrintConfig(const v1::ServerConfig& config) {
  PrintConfig print;
  for (const Setting& setting : AllSettings()) {
    for (const std::string& line : setting.comment) absl::StrAppend(&print.text, "# ", line, "\n");
    absl::StrAppend(&print.text, setting.field->name(), ": ", ValueText(config, *setting.field),
                    "\n\n");
  }
  return print;
}

PrintHelp ToPrintHelp(const v1::ServerConfig& defaults) {
  PrintHelp help{.text =
                     "epikvd serves a TorchScript model over gRPC, each request's KV cache held to "
                     "a budget of its own.\n\n"
                     "  epikvd --model=model.pt [--config=FILE] [--name=value ...]\n\n"
                     "  --name=value    a setting of those below; of bytes also as 512MiB, 8GiB\n"
                     "  --config=FILE   settings in text format; deploy/epikvd.textproto has all\n"
                     "  --print_config  print the settings as they are after file and flags\n"
                     "  --version       print the version\n"
                     "  --help          this\n\n"};
  for (const Setting& setting : AllSettings()) {
    absl::StrAppend(&help.text, "  --", setting.field->name(), "=",
                    ValueText(defaults, *setting.field), "\n");
    for (const std::string& line : setting.comment) {
      absl::StrAppend(&help.text, "      ", line, "\n");
    }
  }
  return help;
}

// Defaults, then the file, then flags.
v1::ServerConfig Settle(const Arguments& arguments, Problems& problems) {
  v1::ServerConfig config = DefaultConfig();
  if (arguments.file.has_value()) ApplyFile(*arguments.file, config, problems);
  for (const Flag& flag : arguments.flags) ApplyFlag(flag, config, problems);
  return config;
}

absl::Status StatusOf(Problems problems, const std::vector<FieldViolation>& violations) {
  for (const FieldViolation& violation : violations) {
    problems.push_back(absl::StrCat("--", violation.field, " ", violation.description));
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));
}

}  // namespace

absl::StatusOr<Command> ParseCommandLine(absl::Span<const std::string> args) {
  Problems problems;
  const Arguments arguments = SortArguments(args, problems);
  if (arguments.help) return ToPrintHelp(DefaultConfig());
  if (arguments.version) return PrintVersion();
  v1::ServerConfig config = Settle(arguments, problems);
  std::vector<FieldViolation> violations = ViolationsOf(config);
  // Who mistyped a flag may have named a model by it.
  if (!arguments.print_config && problems.empty()) {
    for (FieldViolation& violation : ViolationsOfRun(config)) {
      violations.push_back(std::move(violation));
    }
  }
  if (absl::Status status = StatusOf(problems, violations); !status.ok()) return status;
  if (arguments.print_config) return ToPrintConfig(config);
  return Run{std::move(config)};
}

absl::StatusOr<Config> ParseSettings(absl::Span<const std::string> args) {
  Problems problems;
  const Arguments arguments = SortArguments(args, problems);
  if (arguments.help) {
    problems.push_back("--help is only for epikvd; epikv-probe takes only settings");
  }
  if (arguments.version) {
    problems.push_back("--version is only for epikvd; epikv-probe takes only settings");
  }
  if (arguments.print_config) {
    problems.push_back("--print_config is only for epikvd; epikv-probe takes only settings");
  }
  const v1::ServerConfig config = Settle(arguments, problems);
  if (absl::Status status = StatusOf(problems, ViolationsOf(config)); !status.ok()) return status;
  return ConfigOf(config);
}

}  // namespace epikv
