#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace epikv {

// A network between client and server that a test can cut: forwards bytes of every connection to
// one loopback port, until Cut drops them all.
class TcpRelay {
 public:
  explicit TcpRelay(int server_port) : server_port_(server_port) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = Loopback(0);
    bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address));
    listen(listener_, 16);
    socklen_t size = sizeof(address);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~TcpRelay() { Cut(); }

  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

  void Cut() {
    cut_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  static sockaddr_in Loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    return address;
  }

  void Run() {
    std::vector<pollfd> sockets = {{.fd = listener_, .events = POLLIN, .revents = 0}};
    while (!cut_) {
      if (poll(sockets.data(), sockets.size(), /*ms=*/5) <= 0) continue;
      if (sockets[0].revents & POLLIN) Accept(sockets);
      for (size_t i = 1; i < sockets.size(); ++i) {
        if (sockets[i].revents != 0) Forward(sockets[i].fd, sockets[Peer(i)].fd);
      }
    }
    for (const pollfd& socket : sockets) close(socket.fd);
  }
  // Two ends of a connection stand at 1 and 2, 3 and 4, ...
  static size_t Peer(size_t i) { return i % 2 == 1 ? i + 1 : i - 1; }

  void Accept(std::vector<pollfd>& sockets) {
    const int client = accept(listener_, nullptr, nullptr);
    const int server = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = Loopback(server_port_);
    connect(server, reinterpret_cast<sockaddr*>(&address), sizeof(address));
    for (int fd : {client, server}) sockets.push_back({.fd = fd, .events = POLLIN, .revents = 0});
  }

  static void Forward(int from, int to) {
    char buffer[16384];
    const ssize_t size = recv(from, buffer, sizeof(buffer), MSG_DONTWAIT);
    for (ssize_t sent = 0; sent < size;) {
      const ssize_t n = send(to, buffer + sent, static_cast<size_t>(size - sent), MSG_NOSIGNAL);
      if (n <= 0) return;
      sent += n;
    }
  }

  const int server_port_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<bool> cut_{false};
  std::thread thread_;
};

}  // namespace epikv
