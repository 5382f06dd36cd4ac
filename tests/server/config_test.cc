#include "server/daemon/config.h"
#include "server/daemon/command_line.h"
#include "server/daemon/config_checks.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "epikv/v1/config.pb.h"

namespace epikv {
namespace config_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A file that is gone with the object.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text)
      : path_(absl::StrCat(::testing::TempDir(), "/config_test.", getpid(), ".textproto")) {
    std::ofstream(path_) << text;
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

Config Parse(const std::vector<std::string>& args) {
  const absl::StatusOr<Command> command = ParseCommandLine(args);
  if (command.ok() && std::holds_alternative<Run>(*command)) {
    return ConfigOf(std::get<Run>(*command).config);
  }
  ADD_FAILURE() << command.status();
  return {};
}

std::string Errors(const std::vector<std::string>& args) {
  const absl::StatusOr<Command> command = ParseCommandLine(args);
  EXPECT_FALSE(command.ok());
  return std::string(command.status().message());
}

std::string Printed(const std::vector<std::string>& args) {
  const absl::StatusOr<Command> command = ParseCommandLine(args);
  if (command.ok() && std::holds_alternative<PrintConfig>(*command)) {
    return std::get<PrintConfig>(*command).text;
  }
  ADD_FAILURE() << command.status();
  return "";
}

TEST(ConfigTest, DefaultsAreThoseOfTheCommentedFile) {
  const Config config = Parse({"--model=m.pt"});
  EXPECT_EQ(config.listen, "127.0.0.1:50051");
  EXPECT_EQ(config.metrics_listen, "127.0.0.1:9464");
  EXPECT_EQ(config.models.at(0).path, "m.pt");
  EXPECT_EQ(config.runtime.kv_memory_share, 0.5);
  EXPECT_EQ(config.runtime.kv_dtype, KvDType::kModel);
  EXPECT_EQ(config.runtime.mass_interval, 256);
  EXPECT_EQ(config.serving.scheduler.max_step_tokens, 512);
  EXPECT_EQ(config.serving.scheduler.fixed_chunk_tokens, 0);
  EXPECT_EQ(config.serving.queue.max_tokens, 4194304);
  EXPECT_EQ(config.serving.defaults.max_output_tokens, 1024);
  EXPECT_EQ(config.serving.queue_rule.ageing, absl::Seconds(30));
  EXPECT_EQ(config.serving.queue_rule.quantum_tokens, 2048);
  EXPECT_TRUE(config.serving.refuse_infeasible_deadlines);
  EXPECT_EQ(config.outbox.stall, absl::Seconds(30));
  EXPECT_EQ(config.drain, absl::Seconds(30));
  EXPECT_EQ(config.transport.max_concurrent_streams, 512);
  EXPECT_EQ(config.transport.max_connection_age_grace, absl::Hours(1));
  EXPECT_EQ(config.transport.max_connection_idle, absl::Minutes(15));
  EXPECT_TRUE(config.reflection);
  EXPECT_FALSE(config.vllm_dialect);  // what nobody asked for is not there
}

TEST(ConfigTest, ModelsAreTheFirstAndThoseOfTheList) {
  const Config config = Parse({"--model=a.pt", "--threads=3", "--models=path: 'b.pt' name: 'b'",
                               "--models", "path: 'c.pt' threads: 1 kv_pool_bytes: 4096"});
  ASSERT_EQ(config.models.size(), 3u);
  EXPECT_EQ(config.models[0].path, "a.pt");
  EXPECT_EQ(config.models[1].name, "b");
  EXPECT_EQ(config.models[1].threads, 0) << "as the server's";
  EXPECT_EQ(config.runtime.threads, 3);
  EXPECT_EQ(config.models[2].threads, 1);
  EXPECT_EQ(config.models[2].kv_pool_bytes, 4096);
  EXPECT_EQ(Parse({"--model=m", "--kv_pool_bytes=9"}).runtime.kv_pool_bytes, 9);
  EXPECT_EQ(Parse({"--model=m", "--kv_pool_bytes=8GiB"}).runtime.kv_pool_bytes, int64_t{8} << 30);
  EXPECT_EQ(Parse({"--model=m", "--kv_pool_bytes=1536KiB"}).runtime.kv_pool_bytes, 1536 << 10);
  EXPECT_EQ(Parse({"--models=path: 'b.pt'"}).models.at(0).path, "b.pt") << "no other needed";
  EXPECT_THAT(Printed({"--print_config", "--models=path: 'b.pt' threads: 2"}),
              HasSubstr("\nmodels: [{ path: \"b.pt\" threads: 2 }]\n"));
  EXPECT_THAT(Errors({"--models=name: 'b' threads: 2000"}),
              AllOf(HasSubstr("models[0].path"), HasSubstr("models[0].threads")));
  EXPECT_THAT(Errors({"--model=a", "--model_name=x", "--models=path: 'b' name: 'x'"}),
              HasSubstr("models[0].name"));
  EXPECT_THAT(Errors({"--model=a", "--models=pth: 'b'"}), HasSubstr("--models: "));
}

TEST(ConfigTest, CommentedFilePrintsAsItself) {
  EXPECT_EQ(
      ParseCommandLine({"--config=" EPIKV_SOURCE_DIR "/deploy/epikvd.textproto", "--print_config"})
          .status(),
      absl::OkStatus());
  EXPECT_EQ(Printed({"--config", EPIKV_SOURCE_DIR "/deploy/epikvd.textproto", "--print_config"}),
            Printed({"--print_config"}));
}

TEST(ConfigTest, EveryFieldIsInTheCommentedFileAndInTheHelp) {
  const std::string file = ReadFile(EPIKV_SOURCE_DIR "/deploy/epikvd.textproto");
  const absl::StatusOr<Command> help = ParseCommandLine({"--help"});
  ASSERT_TRUE(help.ok());
  const auto* descriptor = v1::ServerConfig::descriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const std::string& name = descriptor->field(i)->name();
    EXPECT_THAT(file, HasSubstr(absl::StrCat("\n", name, ": ")));
    EXPECT_THAT(std::get<PrintHelp>(*help).text, HasSubstr(absl::StrCat("\n  --", name, "=")));
  }
}

// "optional uint32 threads = 5;  // default 0" says what the commented file has.
TEST(ConfigTest, DefaultsInTheProtoAgreeWithTheCommentedFile) {
  const std::string file = ReadFile(EPIKV_SOURCE_DIR "/deploy/epikvd.textproto");
  const std::string proto = ReadFile(EPIKV_SOURCE_DIR "/proto/epikv/v1/config.proto");
  int found = 0;
  for (absl::string_view line : absl::StrSplit(proto, '\n')) {
    const std::vector<absl::string_view> parts =
        absl::StrSplit(line, absl::ByAnyChar(" ;:"), absl::SkipEmpty());
    const auto word = std::find(parts.begin(), parts.end(), "default");
    if (word == parts.end() || parts[0] != "optional") continue;
    // "optional TYPE NAME = NUMBER // default VALUE"; an address has a colon of its own.
    const size_t value = line.find("default ") + std::string("default ").size();
    const size_t end =
        line[value] == '"' ? line.find('"', value + 1) + 1 : line.find_first_of(",: ", value);
    EXPECT_THAT(
        file, HasSubstr(absl::StrCat("\n", parts[2], ": ", line.substr(value, end - value), "\n")));
    ++found;
  }
  EXPECT_EQ(found, v1::ServerConfig::descriptor()->field_count() - 3);  // model, model_name, models
}

TEST(ConfigTest, FlagsGoOverTheFileWhereverTheyStand) {
  const TemporaryFile file("model: \"a.pt\"\nthreads: 3\ndrain_seconds: 1.5\n");
  const Config config = Parse({"--threads", "5", "--config", file.path(), "--model=b.pt"});
  EXPECT_EQ(config.runtime.threads, 5);
  EXPECT_EQ(config.models.at(0).path, "b.pt");
  EXPECT_EQ(config.drain, absl::Milliseconds(1500));
}

TEST(ConfigTest, FlagsAreGivenInEveryUsualForm) {
  EXPECT_TRUE(Parse({"--model=m", "--deterministic"}).runtime.deterministic);
  EXPECT_EQ(Parse({"--model=m", "--kv_dtype=int8"}).runtime.kv_dtype, KvDType::kInt8);
  EXPECT_FALSE(Parse({"--model=m", "--reflection=false"}).reflection);
  EXPECT_TRUE(Parse({"--model=m", "--vllm-dialect"}).vllm_dialect);
  EXPECT_EQ(Parse({"--model", "m", "--max-step-tokens", "64"}).serving.scheduler.max_step_tokens,
            64);
  EXPECT_EQ(Parse({"--model=a\"b\\c=d e"}).models.at(0).path, "a\"b\\c=d e");
}

TEST(ConfigTest, DeterministicPrefillsInChunksOfItsForwards) {
  EXPECT_EQ(Parse({"--model=m", "--deterministic"}).serving.scheduler.fixed_chunk_tokens, 16);
  EXPECT_THAT(Errors({"--model=m", "--deterministic", "--prefill_chunk_tokens=100"}),
              HasSubstr("--prefill_chunk_tokens must be a multiple of 16"));
}

TEST(ConfigTest, DevicesAreTheCpuAndCuda) {
  EXPECT_EQ(Parse({"--model=m"}).runtime.device, "cpu");
  EXPECT_EQ(Parse({"--model=m", "--device=cuda"}).runtime.device, "cuda");
  EXPECT_THAT(Errors({"--model=m", "--device=tpu"}),
              HasSubstr("--device must be cpu or cuda, is \"tpu\""));
  EXPECT_THAT(Errors({"--model=m", "--device=cuda", "--deterministic"}),
              HasSubstr("--deterministic must be off with --device=cuda"));
  EXPECT_THAT(Errors({"--model=m", "--device=cuda", "--kv_dtype=int8"}),
              HasSubstr("--kv_dtype must be model with --device=cuda"));
}

TEST(ConfigTest, NamesEverythingThatIsWrong) {
  const std::string errors =
      Errors({"--listen=nowhere", "--metrics_listen=host:70000", "--kv_memory_share=nan",
              "--kv_dtype=int4", "--max_step_tokens=0", "--cpu=sse2", "--decode_kernel=fast",
              "--prefill_kernel=matmul", "--outbox_bytes=1", "--stream_stall_seconds=0",
              "--drain_seconds=-1", "--default_max_output_tokens=0",
              "--priority_ageing_seconds=inf", "--fairness_quantum_tokens=0", "--threads=x",
              "--thread=2", "stray", "--metrics_max_series"});
  for (const char* name :
       {"--listen must be host:port", "--metrics_listen must",
        "--kv_memory_share must be in (0, 1], is nan",
        "--kv_dtype must be model or int8, is \"int4\"", "--max_step_tokens must",
        "--cpu must be auto, avx512, avx2 or plain, is \"sse2\"", "is \"fast\"",
        "--prefill_kernel must be auto, flash or batch, is \"matmul\"", "--outbox_bytes must",
        "--default_max_output_tokens must be at least 1", "--stream_stall_seconds must",
        "--drain_seconds must", "--priority_ageing_seconds must be above 0, is inf",
        "--fairness_quantum_tokens must be at least 1", "--threads must be a whole number",
        "unknown flag --thread; did you mean --threads?", "'stray' is not a flag",
        "--metrics_max_series needs a value"}) {
    EXPECT_THAT(errors, HasSubstr(name));
  }
}

TEST(ConfigTest, WhoMistypesAFlagMayHaveNamedAModelByIt) {
  EXPECT_THAT(Errors({"--threads=1"}), HasSubstr("--model must name the file"));
  EXPECT_THAT(Errors({"--modle=m"}), AllOf(HasSubstr("unknown flag --modle"),
                                           Not(HasSubstr("--model must name the file"))));
}

TEST(ConfigTest, TlsFilesAreNamedTogether) {
  const TlsFiles tls =
      Parse({"--model=m", "--tls_certificate=c", "--tls_key=k", "--tls_client_ca=a"}).tls;
  EXPECT_EQ(tls.certificate, "c");
  EXPECT_EQ(tls.key, "k");
  EXPECT_EQ(tls.client_ca, "a");
  EXPECT_THAT(Errors({"--model=m", "--tls_certificate=c"}),
              HasSubstr("--tls_key must name the private key file of --tls_certificate"));
  EXPECT_THAT(Errors({"--model=m", "--tls_key=k", "--tls_client_ca=a"}),
              AllOf(HasSubstr("--tls_certificate must name a file, since --tls_key is set"),
                    HasSubstr("--tls_certificate must name a file, since --tls_client_ca is set")));
}

TEST(ConfigTest, LimitsOfConnectionsAreChecked) {
  const TransportLimits limits = Parse({"--model=m"}).transport;
  EXPECT_EQ(limits.max_message_bytes, 4194304);
  EXPECT_EQ(limits.max_connection_age, absl::Minutes(30));
  EXPECT_EQ(limits.max_connection_age_grace, absl::Hours(1));
  EXPECT_EQ(Parse({"--model=m", "--max_connection_age_grace_seconds=0"})
                .transport.max_connection_age_grace,
            absl::InfiniteDuration());
  EXPECT_EQ(Parse({"--model=m", "--max_connection_idle_seconds=1.5"}).transport.max_connection_idle,
            absl::Milliseconds(1500));
  const std::string errors =
      Errors({"--model=m", "--max_message_bytes=1", "--max_sent_message_bytes=1",
              "--max_connections=0", "--max_connections_per_peer=0", "--max_concurrent_streams=0",
              "--keepalive_floor_seconds=0", "--max_connection_age_seconds=-1",
              "--max_connection_age_grace_seconds=nan", "--max_connection_idle_seconds=inf"});
  for (const char* name : {"max_message_bytes", "max_sent_message_bytes", "max_connections",
                           "max_connections_per_peer", "max_concurrent_streams",
                           "keepalive_floor_seconds", "max_connection_age_seconds",
                           "max_connection_age_grace_seconds", "max_connection_idle_seconds"}) {
    EXPECT_THAT(errors, HasSubstr(absl::StrCat("--", name, " must be")));
  }
}

TEST(ConfigTest, ChannelzIsNotForTheNetwork) {
  EXPECT_TRUE(Parse({"--model=m", "--channelz"}).channelz);
  EXPECT_THAT(Errors({"--model=m", "--channelz", "--admin_listen=0.0.0.0:1"}),
              HasSubstr("--channelz must be off"));
  EXPECT_TRUE(Parse({"--model=m", "--channelz", "--admin_listen=0.0.0.0:1", "--auth_tokens_file=t",
                     "--tls_certificate=c", "--tls_key=k", "--tls_client_ca=a"})
                  .channelz);
}

TEST(ConfigTest, TextThatNoMessageCanHoldIsRefused) {
  EXPECT_THAT(Errors({"--model=m\xe9", "--model_name=caf\xe9", "--default_policy=\x80",
                      "--models=path: '\xff' name: '\xff' artefact_dir: '\xff'"}),
              AllOf(HasSubstr("--model must be UTF-8, is \"m\\351\""),
                    HasSubstr("--model_name must be UTF-8, is \"caf\\351\""),
                    HasSubstr("--default_policy must be UTF-8"),
                    HasSubstr("--models[0].path must be UTF-8"),
                    HasSubstr("--models[0].name must be UTF-8"),
                    HasSubstr("--models[0].artefact_dir must be UTF-8")));
  EXPECT_EQ(Parse({"--model=m", "--model_name=café"}).models.at(0).name, "café");
}

TEST(ConfigTest, NameOfAModelFitsIntoALine) {
  EXPECT_THAT(Errors({"--model=m", "--model_name=a\nb",
                      absl::StrCat("--models=path: 'b' name: '", std::string(129, 'n'), "'"),
                      "--models=path: 'c' name: 'say \"c\"'"}),
              AllOf(HasSubstr("--model_name must have 1 to 128 bytes and no control character"),
                    HasSubstr("--models[0].name must have 1 to 128 bytes"),
                    HasSubstr("--models[1].name must have 1 to 128 bytes")));
  EXPECT_EQ(Parse({"--model=m", "--model_name=org/model v1.2"}).models.at(0).name,
            "org/model v1.2");
}

TEST(ConfigTest, NumberOfBytesIsWholeAndHasOneUnit) {
  for (const char* bytes : {"8GB", "1.5GiB", "GiB", "-1GiB", "16777216TiB", "8MiBKiB"}) {
    EXPECT_THAT(Errors({"--model=m", absl::StrCat("--kv_pool_bytes=", bytes)}),
                HasSubstr("--kv_pool_bytes must be a whole number of 0 to 2^64 - 1 (or as 512MiB, "
                          "8GiB), is \""))
        << bytes;
  }
  EXPECT_THAT(Errors({"--model=m", "--threads=8GiB"}), HasSubstr("--threads must be"));
}

TEST(ConfigTest, FlagHoldsOneValue) {
  EXPECT_THAT(Errors({"--model=m", "--threads=5 6", "--drain_seconds=1 threads: 2",
                      "--models=path: 'a' } models { path: 'b'"}),
              AllOf(HasSubstr("--threads must be a whole number of 0 to 4294967295, is \"5 6\""),
                    HasSubstr("--drain_seconds must be a number"),
                    HasSubstr("--models must be one value")));
  EXPECT_EQ(Parse({"--model=m", "--threads= 5 "}).runtime.threads, 5);
}

TEST(ConfigTest, UnknownFieldsOfAFileAreNamedWithTheirLines) {
  const TemporaryFile file("model: \"m\"\nthraeds: 2\nlisten: \"[::]:0\"\nmetric: 1\n");
  const std::string errors = Errors({"--config=" + file.path()});
  EXPECT_THAT(errors, AllOf(HasSubstr(absl::StrCat(file.path(), ":2: ")), HasSubstr("thraeds"),
                            HasSubstr(absl::StrCat(file.path(), ":4: ")), Not(HasSubstr(":3:"))));
}

TEST(ConfigTest, MissingFileIsNamed) {
  EXPECT_THAT(Errors({"--config=/nowhere.textproto"}),
              HasSubstr("--config: cannot read '/nowhere.textproto'"));
  EXPECT_THAT(Errors({"--config=/tmp"}),
              HasSubstr("--config: cannot read '/tmp': it is not a regular file"));
}

TEST(ConfigTest, ConfigurationThatCouldNotRunIsNotPrinted) {
  const std::string errors = Errors({"--print_config", "--max_step_tokens=0", "--listen=nowhere"});
  EXPECT_THAT(errors, AllOf(HasSubstr("--max_step_tokens must"), HasSubstr("--listen must"),
                            Not(HasSubstr("--model must"))));
}

TEST(ConfigTest, PrintedConfigurationIsOneThatItReads) {
  const std::string printed = Printed({"--print_config", "--model=m", "--threads=7"});
  EXPECT_THAT(printed, AllOf(HasSubstr("\nthreads: 7\n"), HasSubstr("# Threads of the engine")));
  const TemporaryFile file(printed);
  EXPECT_EQ(Printed({"--print_config", "--config=" + file.path()}), printed);
}

TEST(ConfigTest, ADialectThatNamesNoModelWantsOne) {
  EXPECT_THAT(Errors({"--model=m", "--models=path: 'b' name: 'b'", "--vllm_dialect"}),
              HasSubstr("--vllm_dialect must be false where several models are served"));
  Parse({"--models=path: 'b' name: 'b'", "--vllm_dialect"});
}

TEST(ConfigTest, APortForOtherMachinesNeedsTokens) {
  for (const char* port : {"listen", "admin_listen"}) {
    const std::string open = absl::StrCat("--", port, "=0.0.0.0:1");
    EXPECT_THAT(Errors({"--model=m", open}),
                HasSubstr(absl::StrCat("--", port, " must be on loopback, is \"0.0.0.0:1\"")));
    EXPECT_THAT(Errors({"--model=m", open, "--tls_certificate=c", "--tls_key=k"}),
                HasSubstr("--allow_anonymous"));
    Parse({"--model=m", open, "--auth_tokens_file=t"});
    Parse({"--model=m", open, "--allow_anonymous"});
    EXPECT_THAT(Printed({"--print_config", open}), HasSubstr("0.0.0.0:1"));
  }
  Parse({"--model=m", "--listen=localhost:1", "--admin_listen="});
}

// For epikv-probe.
TEST(ConfigTest, SettingsOfAProgramBesideTheDaemonNeedNoModel) {
  const TemporaryFile file("listen: '0.0.0.0:7'\ntls_certificate: 'c' tls_key: 'k'\n");
  const absl::StatusOr<Config> config =
      ParseSettings({absl::StrCat("--config=", file.path()), "--listen=0.0.0.0:8"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->listen, "0.0.0.0:8");
  EXPECT_EQ(config->tls.certificate, "c");
  EXPECT_THAT(
      std::string(ParseSettings({"--listen=x", "--threads=-1", "--help"}).status().message()),
      AllOf(HasSubstr("--listen must be"), HasSubstr("--threads"), HasSubstr("--help")));
}

TEST(ConfigTest, ExperimentsAreKeptInAFileOrInPostgresql) {
  const Config none = Parse({"--model=m"});
  EXPECT_EQ(none.experiments.store, "");
  const Config file =
      Parse({"--model=m", "--experiment_store=e.db", "--experiment_retention_days=0"});
  EXPECT_EQ(file.experiments.spool, "e.db.spool");
  EXPECT_EQ(file.experiments.retention, absl::InfiniteDuration());
  const Config shared =
      Parse({"--model=m", "--experiment_store=postgresql://ann@db:5432/epikv?sslmode=require",
             "--experiment_spool=/var/spool/epikv"});
  EXPECT_EQ(shared.experiments.spool, "/var/spool/epikv");
  EXPECT_THAT(Errors({"--model=m", "--experiment_store=postgresql://db/epikv"}),
              HasSubstr("--experiment_spool must name a folder"));
  EXPECT_THAT(Errors({"--model=m", "--experiment_store=mysql://db/epikv"}),
              HasSubstr("--experiment_store must be a file or postgresql://"));
  for (const char* secret : {"postgresql://ann:hunter2@db/epikv", "postgresql://:hunter2@db/epikv",
                             "postgresql://db/epikv?user=ann&password=hunter2"}) {
    const std::string errors = Errors({"--model=m", absl::StrCat("--experiment_store=", secret)});
    EXPECT_THAT(errors, HasSubstr("--experiment_store must hold no password"));
    EXPECT_THAT(errors, Not(HasSubstr("hunter2")));
  }
}

}  // namespace config_test
}  // namespace epikv
