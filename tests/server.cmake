# Tests of server/: the real services over a fake executor, without torch.

# In OUT, under ThreadSanitizer: the tests in FOLDER that start a server, and so run over real gRPC.
# Debian builds it without the sanitizer: it hands calls from thread to thread by atomics that the
# sanitizer does not see, so that every call looks like a race. outbox_test stands in for these
# there: engine thread, outboxes and courier with writers of its own.
function(epikv_over_grpc out folder)
  set(found)
  if(EPIKV_SANITIZE MATCHES thread)
    file(GLOB tests CONFIGURE_DEPENDS ${folder}/*_test.cc)
    foreach(test IN LISTS tests)
      file(STRINGS ${test} lines REGEX "fake_server\\.h|generation_fixture\\.h|CreateChannel")
      if(lines)
        cmake_path(GET test FILENAME name)
        list(APPEND found ${name})
      endif()
    endforeach()
  endif()
  set(${out} ${found} PARENT_SCOPE)
endfunction()
epikv_over_grpc(_server_over_grpc server)
epikv_over_grpc(_experiments_over_grpc experiments)
epikv_test(server_test FOLDER server EXCEPT broken_policy_test.cc ${_server_over_grpc} SHARDS 4
           LIBS epikv_server nlohmann_json::nlohmann_json)

# One process each of those that start a PostgreSQL server: it takes a second.
set(_stores experiment_store_test.cc experiment_switchback_test.cc recorder_test.cc)
epikv_test(experiments_test FOLDER experiments EXCEPT ${_stores} ${_experiments_over_grpc} SHARDS 4
           LIBS epikv_server nlohmann_json::nlohmann_json)
epikv_test(stores_test FOLDER experiments FILES ${_stores}
           LIBS epikv_server nlohmann_json::nlohmann_json)

# What recorder_test kills.
add_executable(recorder_crash experiments/recorder_crash.cc)
target_link_libraries(recorder_crash PRIVATE epikv_server)
epikv_reuse_headers(recorder_crash epikv_server_pch)
epikv_watch_threads(recorder_crash)
add_dependencies(stores_test recorder_crash)
target_compile_definitions(stores_test PRIVATE EPIKV_RECORDER_CRASH="$<TARGET_FILE:recorder_crash>")

# What epikv_lab.bench.experiment_power runs.
add_executable(experiment_power bench/experiment_power.cc)
target_link_libraries(experiment_power PRIVATE epikv_server)

# What `epikv bench experiment` runs.
add_executable(experiment_costs bench/experiment_costs.cc)
target_link_libraries(experiment_costs PRIVATE epikv_server)
epikv_reuse_headers(experiment_costs epikv_server_pch)

# Over a real engine, too. Its own part includes no torch: see runtime.h.
if(EPIKV_TORCH AND NOT EPIKV_SANITIZE MATCHES thread)
  add_library(epikv_broken_policy STATIC fixtures/broken_policy.cc)
  target_link_libraries(epikv_broken_policy PRIVATE epikv_policies)
  target_precompile_headers(epikv_broken_policy REUSE_FROM epikv_torch_pch)
  epikv_compile_as_tests(epikv_broken_policy)
  epikv_test(broken_policy_test FOLDER server FILES broken_policy_test.cc MODELS
             LIBS epikv_broken_policy epikv_server epikv_runtime)
endif()
