// The port over TLS, with certificates that the openssl command makes. What a rotation does to a
// running daemon: e2e/operating/security_test.py.

#include "server/port/tls.h"

#include <gmock/gmock.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "epikv/v1/model.grpc.pb.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/temporary_folder.h"

namespace epikv {
namespace tls_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class TlsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder;
    MakeAuthority("ca");
    MakeAuthority("other_ca");
    Sign("server", "ca");
    Sign("client", "ca");
    Sign("stranger", "other_ca");
    Run("openssl pkey -in ca.key -aes128 -passout pass:x -out locked.key");
    folder_->Write("text.pem", "no certificate");
  }
  static void TearDownTestSuite() { delete folder_; }

  static void Run(const std::string& command) {
    const std::string there = absl::StrCat("cd ", folder_->File(""), " && ", command, " 2>log");
    ASSERT_EQ(std::system(there.c_str()), 0) << command << "\n" << folder_->Read("log");
  }
  static void MakeAuthority(const std::string& name) {
    Run(absl::StrCat(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 ",
        "-subj /CN=", name, " -keyout ", name, ".key -out ", name, ".pem"));
  }
  static void Sign(const std::string& name, const std::string& authority) {
    folder_->Write("names", "subjectAltName=DNS:localhost,IP:127.0.0.1");
    Run(absl::StrCat("openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=",
                     name, " -keyout ", name, ".key -out ", name, ".csr"));
    Run(absl::StrCat("openssl x509 -req -days 2 -in ", name, ".csr -CA ", authority, ".pem -CAkey ",
                     authority, ".key -CAcreateserial -extfile names -out ", name, ".pem"));
  }
  static std::string File(const std::string& name) { return folder_->File(name); }
  static TlsFiles Files(const std::string& client_ca = "") {
    return {.certificate = File("server.pem"), .key = File("server.key"), .client_ca = client_ca};
  }

  // A client of `ca` that presents `certificate`, if there is one.
  static std::shared_ptr<grpc::ChannelCredentials> Trusting(const std::string& ca,
                                                            const std::string& certificate = "") {
    return grpc::SslCredentials(
        {.pem_root_certs = folder_->Read(ca + ".pem"),
         .pem_private_key = certificate.empty() ? "" : folder_->Read(certificate + ".key"),
         .pem_cert_chain = certificate.empty() ? "" : folder_->Read(certificate + ".pem")});
  }
  // The code of a call to a server with these files.
  static grpc::StatusCode Call(const TlsFiles& files,
                               std::shared_ptr<grpc::ChannelCredentials> credentials) {
    FakeServer server({.tls = files});
    const auto channel = grpc::CreateChannel(server.address(), std::move(credentials));
    v1::ModelService::Stub stub(channel);
    grpc::ClientContext context;
    v1::ListModelsResponse response;
    return stub.ListModels(&context, {}, &response).error_code();
  }
  static std::string Faults(const TlsFiles& files) {
    return std::string(CheckTlsFiles(files).message());
  }

  static TemporaryFolder* folder_;
};

TemporaryFolder* TlsTest::folder_ = nullptr;

TEST_F(TlsTest, ACertificateSaysWhenItEnds) {
  const absl::StatusOr<absl::Time> end = CertificateExpiry(File("server.pem"));
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_LT(*end - absl::Now(), absl::Hours(48));
  EXPECT_GT(*end - absl::Now(), absl::Hours(47));
  EXPECT_THAT(CertificateExpiry(File("text.pem")).status().message(), HasSubstr("no certificate"));
}

TEST_F(TlsTest, ClientsThatTrustTheServerAreServed) {
  ASSERT_EQ(CheckTlsFiles(Files()), absl::OkStatus());
  EXPECT_EQ(Call(Files(), Trusting("ca")), grpc::OK);
}

TEST_F(TlsTest, ClientsThatDoNotTrustItOrSpeakPlainTextAreNot) {
  EXPECT_EQ(Call(Files(), Trusting("other_ca")), grpc::UNAVAILABLE);
  EXPECT_EQ(Call(Files(), grpc::InsecureChannelCredentials()), grpc::UNAVAILABLE);
}

TEST_F(TlsTest, WithClientCaOnlyClientsThatItSignedAreServed) {
  const TlsFiles files = Files(File("ca.pem"));
  ASSERT_EQ(CheckTlsFiles(files), absl::OkStatus());
  EXPECT_EQ(Call(files, Trusting("ca", "client")), grpc::OK);
  EXPECT_EQ(Call(files, Trusting("ca", "stranger")), grpc::UNAVAILABLE);
  EXPECT_EQ(Call(files, Trusting("ca")), grpc::UNAVAILABLE);
}

TEST_F(TlsTest, EveryFileAtFaultIsNamed) {
  EXPECT_THAT(Faults({.certificate = File("absent.pem"),
                      .key = File("text.pem"),
                      .client_ca = File("server.key")}),
              AllOf(HasSubstr(absl::StrCat("--tls_certificate: cannot read '", File("absent.pem"),
                                           "': No such file")),
                    HasSubstr(absl::StrCat("--tls_key: '", File("text.pem"),
                                           "' holds no private key in PEM")),
                    HasSubstr(absl::StrCat("--tls_client_ca: '", File("server.key"),
                                           "' holds no certificate in PEM"))));
}

TEST_F(TlsTest, KeyOfAnotherCertificateIsRefused) {
  EXPECT_THAT(Faults({.certificate = File("server.pem"), .key = File("client.key")}),
              HasSubstr(absl::StrCat("--tls_key: '", File("client.key"), "' is not the key of '",
                                     File("server.pem"), "'")));
}

// OpenSSL would ask the terminal.
TEST_F(TlsTest, KeyWithAPasswordIsRefused) {
  EXPECT_THAT(Faults({.certificate = File("ca.pem"), .key = File("locked.key")}),
              AllOf(HasSubstr("without a password"), Not(HasSubstr("is not the key"))));
}

TEST(LoopbackTest, IsWhatOnlyThisMachineReaches) {
  for (const char* address : {"127.0.0.1:1", "127.8.0.1:1", "localhost:1", "[::1]:1"}) {
    EXPECT_TRUE(IsLoopback(address)) << address;
  }
  for (const char* address : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "127host:1", "host:127"}) {
    EXPECT_FALSE(IsLoopback(address)) << address;
  }
}

}  // namespace tls_test
}  // namespace epikv
