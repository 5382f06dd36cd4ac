#pragma once

#include <fcntl.h>
#include <libpq-fe.h>
#include <pwd.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/temporary_folder.h"

namespace epikv {

// A PostgreSQL server of the test's own, of Debian's package, in a temporary folder and on a socket
// there; it ends with the object, or with the process. As root it runs as another user: PostgreSQL
// refuses to be root. Of one thread.
class PostgresServer {
 public:
  enum class Sync { kOff, kOn };  // kOff: quick, and for tests that pull no plug

  explicit PostgresServer(Sync sync) : sync_(sync) {
    const passwd* user = geteuid() != 0 ? nullptr : getpwnam("postgres");
    if (geteuid() == 0 && user == nullptr) user = getpwnam("nobody");
    if (user != nullptr) uid_ = user->pw_uid, gid_ = user->pw_gid;
    if (user != nullptr && chown(folder_.File("").c_str(), uid_, gid_) != 0) abort();
    const pid_t initdb = Spawn({"initdb", "-D", data(), "-A", "trust", "-U", "epikv", "--no-sync",
                                "--no-locale", "-E", "UTF8"});
    int status = 0;
    waitpid(initdb, &status, 0);
    if (status != 0) ADD_FAILURE() << "initdb failed; is Debian's postgresql installed?";
    // Who is `locked` needs a password.
    std::ofstream(data() + "/pg_hba.conf")
        << "local all locked scram-sha-256\nlocal all all trust\n";
    Start();
  }
  ~PostgresServer() { Stop(); }

  void Start() {
    // After a crash, not to sync each of its thousand files by itself.
    server_ = Spawn({"postgres", "-D", data(), "-k", folder_.File(""), "-c",
                     "listen_addresses=", "-c", sync_ == Sync::kOn ? "fsync=on" : "fsync=off", "-c",
                     "shared_buffers=16MB", "-c", "recovery_init_sync_method=syncfs"});
    const std::string ping = Url("postgres");
    while (PQping(ping.c_str()) != PQPING_OK) absl::SleepFor(absl::Milliseconds(10));
  }
  // Connections are cut, and what was not committed is lost.
  void Stop() {
    if (server_ <= 0) return;
    kill(server_, SIGQUIT);
    waitpid(server_, nullptr, 0);
    server_ = -1;
  }

  // A database with nothing in it.
  std::string MakeDatabase() {
    const std::string name = absl::StrCat("d", ++databases_);
    Execute("postgres", "CREATE DATABASE " + name);
    return name;
  }
  std::string Url(const std::string& database, const std::string& user = "epikv") const {
    return absl::StrCat("postgresql://", user, "@/", database, "?host=", folder_.File(""));
  }
  // The first value of the first row; "" if there is none.
  std::string Execute(const std::string& database, const std::string& sql) const {
    std::unique_ptr<PGconn, void (*)(PGconn*)> connection(PQconnectdb(Url(database).c_str()),
                                                          PQfinish);
    PQsetNoticeProcessor(
        connection.get(), [](void*, const char*) {}, nullptr);
    std::unique_ptr<PGresult, void (*)(PGresult*)> result(PQexec(connection.get(), sql.c_str()),
                                                          PQclear);
    const ExecStatusType status = PQresultStatus(result.get());
    EXPECT_TRUE(status == PGRES_COMMAND_OK || status == PGRES_TUPLES_OK)
        << sql << ": " << PQerrorMessage(connection.get());
    return PQntuples(result.get()) > 0 ? PQgetvalue(result.get(), 0, 0) : "";
  }

 private:
  std::string data() const { return folder_.File("data"); }

  // One of the server's programs, with its output in a file.
  pid_t Spawn(const std::vector<std::string>& command) const {
    const std::string program = Program(command[0]);
    const std::string log = folder_.File("log");
    std::vector<char*> arguments;
    for (const std::string& argument : command) {
      arguments.push_back(const_cast<char*>(argument.c_str()));
    }
    arguments.push_back(nullptr);
    const pid_t child = fork();
    if (child != 0) return child;
    if (gid_ != 0 && (setgid(gid_) != 0 || setuid(uid_) != 0)) _exit(1);
    prctl(PR_SET_PDEATHSIG, SIGQUIT);
    const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (out < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0) _exit(1);
    execv(program.c_str(), arguments.data());
    _exit(1);
  }
  static std::string Program(const std::string& name) {
    std::error_code none;
    std::string newest;
    for (const auto& version : std::filesystem::directory_iterator("/usr/lib/postgresql", none)) {
      const std::string path = version.path().string() + "/bin/" + name;
      if (std::filesystem::exists(path) && path > newest) newest = path;
    }
    return newest;
  }

  const Sync sync_;
  TemporaryFolder folder_;
  uid_t uid_ = 0;
  gid_t gid_ = 0;
  pid_t server_ = -1;
  int databases_ = 0;
};

}  // namespace epikv
