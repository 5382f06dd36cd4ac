#include "server/port/tls.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/file_contents.h"

namespace epikv {
namespace {

// How often gRPC looks at the files.
constexpr unsigned kRefreshSeconds = 1;

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;

using Problems = std::vector<std::string>;

// No password: OpenSSL's own callback would ask the terminal for one.
int NoPassword(char*, int, int, void*) { return 0; }

// The file's text, to be read by OpenSSL; null, and the problem said, if it cannot be read.
Owned<BIO> Open(const std::string& flag, const std::string& path, Problems& problems) {
  const absl::StatusOr<FileContents> file = ReadFile(path);
  if (!file.ok()) {
    problems.push_back(absl::StrCat("--", flag, ": ", file.status().message()));
    return nullptr;
  }
  Owned<BIO> bio(BIO_new(BIO_s_mem()));
  BIO_write(bio.get(), file->text.data(), static_cast<int>(file->text.size()));
  return bio;
}

// The first certificate of a file.
Owned<X509> ReadCertificate(const std::string& flag, const std::string& path, Problems& problems) {
  const Owned<BIO> bio = Open(flag, path, problems);
  if (bio == nullptr) return nullptr;
  Owned<X509> certificate(PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr));
  if (certificate == nullptr) {
    problems.push_back(absl::StrCat("--", flag, ": '", path, "' holds no certificate in PEM"));
  }
  return certificate;
}

Owned<EVP_PKEY> ReadKey(const std::string& flag, const std::string& path, Problems& problems) {
  const Owned<BIO> bio = Open(flag, path, problems);
  if (bio == nullptr) return nullptr;
  Owned<EVP_PKEY> key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassword, nullptr));
  if (key == nullptr) {
    problems.push_back(
        absl::StrCat("--", flag, ": '", path, "' holds no private key in PEM without a password"));
  }
  return key;
}

}  // namespace

absl::Status CheckTlsFiles(const TlsFiles& files) {
  if (files.certificate.empty()) return absl::OkStatus();
  Problems problems;
  const Owned<X509> certificate = ReadCertificate("tls_certificate", files.certificate, problems);
  const Owned<EVP_PKEY> key = ReadKey("tls_key", files.key, problems);
  if (certificate != nullptr && key != nullptr &&
      X509_check_private_key(certificate.get(), key.get()) != 1) {
    problems.push_back(
        absl::StrCat("--tls_key: '", files.key, "' is not the key of '", files.certificate, "'"));
  }
  if (!files.client_ca.empty()) ReadCertificate("tls_client_ca", files.client_ca, problems);
  ERR_clear_error();  // of this thread, which may do TLS later
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));
}

absl::StatusOr<absl::Time> CertificateExpiry(const std::string& path) {
  Problems problems;
  const Owned<X509> certificate = ReadCertificate("tls_certificate", path, problems);
  ERR_clear_error();
  if (certificate == nullptr) return absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));
  tm ends{};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &ends) != 1) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' has an end that is no time"));
  }
  return absl::FromTM(ends, absl::UTCTimeZone());
}

std::shared_ptr<grpc::ServerCredentials> CredentialsOf(const TlsFiles& files) {
  if (files.certificate.empty()) return grpc::InsecureServerCredentials();
  namespace tls = grpc::experimental;
  tls::TlsServerCredentialsOptions options(std::make_shared<tls::FileWatcherCertificateProvider>(
      files.key, files.certificate, files.client_ca, kRefreshSeconds));
  options.watch_identity_key_cert_pairs();
  if (files.client_ca.empty()) {
    options.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  } else {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return tls::TlsServerCredentials(options);
}

bool IsLoopback(const std::string& listen) {
  const std::string host = listen.substr(0, listen.rfind(':'));
  return absl::StartsWith(host, "127.") || host == "localhost" || host == "[::1]";
}

}  // namespace epikv
