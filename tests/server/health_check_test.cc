// The question that probes ask, at real ports. epikv-probe itself: e2e/operating/probe_test.py.

#include "server/probe/health_check.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/temporary_folder.h"

namespace epikv {
namespace health_check_test {

using ::testing::HasSubstr;

absl::Status Check(const FakeServer& server, const std::string& service = "") {
  return CheckHealth({.listen = server.address(), .service = service});
}

TEST(HealthCheckTest, SaysWhetherRequestsAreTaken) {
  FakeServer server;
  EXPECT_EQ(Check(server), absl::OkStatus());
  EXPECT_EQ(Check(server, "models/fake"), absl::OkStatus());
  for (const ServerState state : {ServerState::kStarting, ServerState::kDraining}) {
    server.lifecycle().SetState(state);
    const absl::Status status = Check(server);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(status.message(), absl::StrCat(server.address(), " is NOT_SERVING"));
    EXPECT_FALSE(Check(server, "models/fake").ok());
  }
}

TEST(HealthCheckTest, LivenessHoldsInEveryState) {
  FakeServer server;
  for (const ServerState state :
       {ServerState::kStarting, ServerState::kServing, ServerState::kDraining}) {
    server.lifecycle().SetState(state);
    EXPECT_EQ(Check(server, "liveness"), absl::OkStatus()) << ServerStateName(state);
  }
}

TEST(HealthCheckTest, NamesWhatIsNotKnown) {
  FakeServer server;
  const absl::Status status = Check(server, "models/other");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'models/other'"));
}

TEST(HealthCheckTest, AsksLoopbackWhereTheDaemonListensEverywhere) {
  FakeServer server;
  const std::string port = server.address().substr(server.address().rfind(':'));
  for (const std::string host : {"0.0.0.0", "[::]"}) {
    EXPECT_EQ(CheckHealth({.listen = host + port}), absl::OkStatus()) << host;
  }
}

TEST(HealthCheckTest, PortThatTheSystemChoseIsNotGuessed) {
  EXPECT_EQ(CheckHealth({.listen = "127.0.0.1:0"}).code(), absl::StatusCode::kInvalidArgument);
}

// A listening socket whose owner takes no connection and says nothing.
class SilentPort {
 public:
  SilentPort() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(socket_, any, size), 0);
    EXPECT_EQ(getsockname(socket_, any, &size), 0);
    address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  }
  ~SilentPort() { close(socket_); }
  void Listen() { EXPECT_EQ(listen(socket_, 8), 0); }
  const std::string& address() const { return address_; }

 private:
  const int socket_;
  std::string address_;
};

TEST(HealthCheckTest, SaysThatNobodyAnswers) {
  SilentPort port;  // bound, so that nobody else has it
  const absl::Status refused = CheckHealth({.listen = port.address()});
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("Connection refused"));
  port.Listen();
  const absl::Status silent =
      CheckHealth({.listen = port.address(), .timeout = absl::Milliseconds(200)});
  EXPECT_EQ(silent.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(silent.message(), absl::StrCat(port.address(), " did not answer within 200ms"));
}

class HealthCheckTlsTest : public ::testing::Test {
 protected:
  // Signed by itself, and in the name of nobody.
  void Make(const std::string& name) {
    const std::string command =
        absl::StrCat("cd ", folder_.File(""), " && openssl req -x509 -newkey ec -pkeyopt ",
                     "ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=", name, " -keyout ", name,
                     ".key -out ", name, ".pem 2>log");
    ASSERT_EQ(std::system(command.c_str()), 0) << folder_.Read("log");
  }
  TlsFiles Files(const std::string& name, const std::string& client_ca = "") const {
    return {.certificate = folder_.File(name + ".pem"),
            .key = folder_.File(name + ".key"),
            .client_ca = client_ca.empty() ? "" : folder_.File(client_ca + ".pem")};
  }

  const TemporaryFolder folder_;
};

TEST_F(HealthCheckTlsTest, AsksOverTlsWhateverTheCertificateNames) {
  Make("server");
  FakeServer server({.tls = Files("server")});
  EXPECT_EQ(CheckHealth({.listen = server.address(), .tls = Files("server")}), absl::OkStatus());
  server.lifecycle().SetState(ServerState::kDraining);
  EXPECT_EQ(CheckHealth({.listen = server.address(), .tls = Files("server")}).message(),
            absl::StrCat(server.address(), " is NOT_SERVING"));
  EXPECT_FALSE(CheckHealth({.listen = server.address()}).ok());  // plain text
}

TEST_F(HealthCheckTlsTest, ShowsItsCertificateWhereOneIsAskedFor) {
  Make("server");
  Make("client");
  FakeServer server({.tls = Files("server", "client")});
  const auto check = [&](const TlsFiles& tls) {
    return CheckHealth({.listen = server.address(), .tls = tls}).code();
  };
  EXPECT_EQ(check(Files("client", "client")), absl::StatusCode::kOk);
  EXPECT_EQ(check(Files("server", "client")), absl::StatusCode::kUnavailable);  // not signed by it
  EXPECT_EQ(check(Files("client")), absl::StatusCode::kUnavailable);            // shows none
  EXPECT_EQ(check(Files("absent", "client")), absl::StatusCode::kNotFound);
}

}  // namespace health_check_test
}  // namespace epikv
