#pragma once

#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace epikv {

// PEM files of the gRPC port.
struct TlsFiles {
  std::string certificate;  // the server's, then what signed it; empty: plain text
  std::string key;          // of the certificate
  std::string client_ca;  // clients must present a certificate signed by it; empty: none asked for
};

// Whether connections can be made with these files. The error names each file that is at fault.
absl::Status CheckTlsFiles(const TlsFiles& files);

// When the file's first certificate ends.
absl::StatusOr<absl::Time> CertificateExpiry(const std::string& path);

// While they live, the files are read again when they change, and new connections have what they
// hold then. A file that cannot be read leaves what was; the key of another certificate fails every
// new connection until they match. Precondition: CheckTlsFiles.
std::shared_ptr<grpc::ServerCredentials> CredentialsOf(const TlsFiles& files);

// Whether only this machine reaches the address, host:port.
bool IsLoopback(const std::string& listen);

}  // namespace epikv
