// Configuration: flags, one a line, an empty line, the file of --config. What is accepted can be
// run, printed, read again and told to a client, and is what was asked for; an error names what is
// wrong, line by line.

#include <google/protobuf/util/message_differencer.h>

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "server/daemon/command_line.h"
#include "server/daemon/config.h"
#include "server/daemon/config_checks.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

void CheckError(absl::string_view error, const std::string& path) {
  Require(!error.empty(), "an error has a text");
  for (absl::string_view line : absl::StrSplit(error, '\n')) {
    Require(absl::StartsWith(line, "--") || absl::StartsWith(line, absl::StrCat(path, ":")) ||
                absl::StartsWith(line, "unknown flag --") || absl::EndsWith(line, "--name=value"),
            "a line of an error names a setting, a flag or a line of the file", line);
  }
}

// None of these is what the runtime divides by or reserves.
void CheckRunnable(const Config& config) {
  Require(!config.models.empty() && !config.models.front().path.empty(), "there is a model");
  Require(config.runtime.threads >= 0 && config.runtime.threads <= 1024, "threads");
  Require(config.runtime.kv_memory_share > 0 && config.runtime.kv_memory_share <= 1, "share");
  Require(config.serving.scheduler.max_step_tokens > 0, "max_step_tokens");
  Require(config.serving.scheduler.prefill_chunk_tokens > 0, "prefill_chunk_tokens");
  Require(config.serving.queue.max_requests > 0 && config.serving.queue.max_tokens > 0, "queue");
  Require(config.serving.defaults.max_output_tokens > 0, "default_max_output_tokens");
  Require(config.outbox.max_messages >= 2 && config.outbox.max_bytes >= 1024, "outbox");
  Require(config.drain >= absl::ZeroDuration(), "drain_seconds");
  for (const ModelSource& model : config.models) Require(model.kv_pool_bytes >= 0, "kv_pool_bytes");
}

void CheckRun(const v1::ServerConfig& config, MemoryFile& file) {
  Require(ViolationsOf(config).empty(), "what runs has no fault");
  CheckRunnable(ConfigOf(config));
  v1::ServerConfig told;  // by AdminService.GetConfig
  Require(told.ParseFromString(config.SerializeAsString()), "a client can read it");
  const std::string path = file.With(config.DebugString());
  const auto again = ParseCommandLine({absl::StrCat("--config=", path)});
  Require(again.ok(), "its text is a file", again.status().message());
  Require(google::protobuf::util::MessageDifferencer::Equals(std::get<Run>(*again).config, config),
          "a file of it says the same", config.DebugString());
}

// A flag of a number, say, holds no more than that.
void CheckLastFlag(std::vector<std::string> args) {
  if (args.size() < 2 || !absl::StartsWith(args.back(), "--")) return;
  if (!absl::StrContains(args[args.size() - 2], '=')) return;  // perhaps it is the value of that
  const size_t end = args.back().find('=');
  if (end == std::string::npos) return;
  const std::string name = absl::StrReplaceAll(args.back().substr(2, end - 2), {{"-", "_"}});
  const auto* field = v1::ServerConfig::descriptor()->FindFieldByName(name);
  if (field == nullptr || field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_STRING) {
    return;
  }
  args.back() += "\n7";
  Require(!ParseCommandLine(args).ok(), "a flag is one value", args.back());
}

void CheckPrinted(const std::string& text, MemoryFile& file) {
  const std::string path = file.With(text);
  const auto again = ParseCommandLine({"--print_config", absl::StrCat("--config=", path)});
  Require(again.ok(), "what is printed can be read", again.status().message());
  Require(std::get<PrintConfig>(*again).text == text, "and says the same", text);
}

void CheckInput(absl::string_view input) {
  MemoryFile file;
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(input, absl::MaxSplits("\n\n", 1));
  const std::string path = file.With(parts.second);
  std::vector<std::string> args = absl::StrSplit(parts.first, '\n', absl::SkipEmpty());
  if (args.size() > 8) return;  // a search for what each unknown one may mean takes its time
  // No file but ours.
  for (const std::string& arg : args) {
    if (absl::StrContains(arg, "config") && !absl::StrContains(arg, "print")) return;
  }
  args.insert(args.begin(), absl::StrCat("--config=", path));
  const absl::StatusOr<Command> command = ParseCommandLine(args);
  if (!command.ok()) return CheckError(command.status().message(), path);
  if (const auto* run = std::get_if<Run>(&*command)) {
    CheckRun(run->config, file);
    CheckLastFlag(args);
  }
  if (const auto* print = std::get_if<PrintConfig>(&*command)) CheckPrinted(print->text, file);
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  epikv::CheckInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
