// Who is counted as connected, and what a listener takes and gives back.

#include "server/port/connections.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "server/port/descriptors.h"
#include "server/port/listener.h"

namespace epikv {
namespace connections_test {

using ::testing::HasSubstr;

sockaddr_storage PeerAt(const std::string& address) {
  sockaddr_storage peer{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(peer);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(peer);
  if (inet_pton(AF_INET, address.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
  } else if (inet_pton(AF_INET6, address.c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
  }
  return peer;
}

// A socket that a transport would own.
class Owned {
 public:
  Owned() : descriptor_(socket(AF_INET, SOCK_STREAM, 0)) {}
  ~Owned() { Close(); }
  int get() const { return descriptor_; }
  void Close() {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = -1;
  }

 private:
  int descriptor_;
};

TEST(ConnectionsTest, PeersAreAnAddressOfFourBytesOrANetworkOfEight) {
  Connections connections({.most = 100, .most_of_peer = 1});
  std::vector<std::unique_ptr<Owned>> sockets;
  auto admit = [&](const std::string& address) {
    sockets.push_back(std::make_unique<Owned>());
    return connections.Admit(sockets.back()->get(), PeerAt(address));
  };
  EXPECT_TRUE(admit("10.0.0.1"));
  EXPECT_FALSE(admit("10.0.0.1"));
  EXPECT_FALSE(admit("::ffff:10.0.0.1"));
  EXPECT_TRUE(admit("10.0.0.2"));
  EXPECT_TRUE(admit("2001:db8::1"));
  EXPECT_FALSE(admit("2001:db8::2"));
  EXPECT_TRUE(admit("2001:db8:0:1::1"));
  EXPECT_EQ(connections.live(), 4);
  EXPECT_EQ(connections.refused(Refused::kPeer), 3);
  EXPECT_EQ(connections.refused(Refused::kPort), 0);
}

TEST(ConnectionsTest, WhatOthersClosedMakesRoom) {
  Connections connections({.most = 2, .most_of_peer = 2});
  Owned first, second, third;
  EXPECT_TRUE(connections.Admit(first.get(), PeerAt("10.0.0.1")));
  EXPECT_TRUE(connections.Admit(second.get(), PeerAt("10.0.0.2")));
  EXPECT_FALSE(connections.Admit(third.get(), PeerAt("10.0.0.3")));
  EXPECT_EQ(connections.refused(Refused::kPort), 1);
  first.Close();
  EXPECT_TRUE(connections.Admit(third.get(), PeerAt("10.0.0.3")));
  EXPECT_EQ(connections.live(), 2);
}

TEST(ConnectionsTest, ANumberThatIsAnotherSocketsByNowIsCountedOnce) {
  Connections connections({.most = 10, .most_of_peer = 1});
  Owned first;
  const int number = first.get();
  EXPECT_TRUE(connections.Admit(number, PeerAt("10.0.0.1")));
  first.Close();
  const Owned file;  // the lowest free number, so the same
  ASSERT_EQ(file.get(), number);
  EXPECT_EQ(connections.live(), 0);
  EXPECT_TRUE(connections.Admit(number, PeerAt("10.0.0.1")));
  EXPECT_EQ(connections.live(), 1);
}

TEST(ConnectionsTest, IsWatchedCloselyWhileACallIsRead) {
  Connections connections({.most = 10, .most_of_peer = 10});
  Owned first, second;
  EXPECT_TRUE(connections.Admit(first.get(), PeerAt("10.0.0.1")));
  connections.CutFloods();
  const absl::Duration from_afar = connections.WatchAgain();
  connections.OnReading("ipv4:10.0.0.1:0");
  const absl::Duration closely = connections.WatchAgain();
  EXPECT_LT(closely, from_afar);
  first.Close();  // amid the call
  EXPECT_TRUE(connections.Admit(second.get(), PeerAt("10.0.0.2")));
  connections.CutFloods();
  EXPECT_EQ(connections.WatchAgain(), from_afar);
  connections.OnReading("ipv4:10.0.0.2:0");
  connections.CutFloods();
  EXPECT_EQ(connections.WatchAgain(), closely);
  connections.OnRead("ipv4:10.0.0.2:0", 10);
  connections.CutFloods();
  EXPECT_EQ(connections.WatchAgain(), from_afar);
}

TEST(ListenerTest, SaysThatAPortIsTaken) {
  auto connections = std::make_shared<Connections>(ConnectionLimits());
  const auto first = Listener::Open("127.0.0.1:0", connections);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string address = "127.0.0.1:" + std::to_string((*first)->port());
  EXPECT_THAT(Listener::Open(address, connections).status().message(), HasSubstr("in use"));
}

TEST(ListenerTest, HasOnePortAtEveryAddressOfAName) {
  auto connections = std::make_shared<Connections>(ConnectionLimits());
  for (const char* host : {"localhost:0", "0.0.0.0:0", "[::]:0", "[::1]:0"}) {
    const auto listener = Listener::Open(host, connections);
    if (host[0] == '[' && !listener.ok()) continue;  // a machine may have no IPv6
    ASSERT_TRUE(listener.ok()) << host << ": " << listener.status();
    EXPECT_GT((*listener)->port(), 0) << host;
  }
}

TEST(ListenerTest, HostThatIsNotOursIsAnError) {
  auto connections = std::make_shared<Connections>(ConnectionLimits());
  EXPECT_FALSE(Listener::Open("203.0.113.1:0", connections).ok());
  EXPECT_FALSE(Listener::Open("no such host:0", connections).ok());
}

TEST(DescriptorsTest, TheLimitIsRaisedToTheHardOne) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 200;
  ASSERT_GT(before.rlim_max, low.rlim_cur);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_EQ(RaiseDescriptorLimit(),
            static_cast<int64_t>(std::min<rlim_t>(before.rlim_max, 1 << 20)));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(DescriptorsTest, LeaveAReserveBesideConnections) {
  EXPECT_LT(ConnectionsWithin(4096), 4096 - 128);
  EXPECT_GT(ConnectionsWithin(4096), 2048);
  EXPECT_EQ(ConnectionsWithin(1), 1);
}

}  // namespace connections_test
}  // namespace epikv
