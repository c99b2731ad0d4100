# mx.array crosses into an extension only when both sides were built with the
# same nanobind internals key. A mismatch imports fine and then fails every call
# with a misleading TypeError, so it is refused here. The key is read from the
# binary as text: nothing is imported, which also works in cross builds.
function(check_nanobind_key mlx_root nanobind_dir nanobind_version)
  file(GLOB core "${mlx_root}/core.cpython-*")
  if(NOT core)
    message(WARNING "No mlx.core binary in ${mlx_root}: nanobind key not checked.")
    return()
  endif()
  list(GET core 0 core)
  file(STRINGS "${core}" key REGEX "nanobind_system_[a-z0-9_]*_a[0-9]+_v[0-9]+")
  if(NOT key MATCHES "nanobind_system_[a-z0-9_]*_a[0-9]+_v([0-9]+)")
    message(FATAL_ERROR "${core} carries no nanobind 3.x internals key.")
  endif()
  set(theirs ${CMAKE_MATCH_1})
  file(GLOB headers "${nanobind_dir}/../src/nb_internals.h"
       "${nanobind_dir}/../src/nb_abi.h")
  file(STRINGS ${headers} line REGEX "define +NB_INTERNALS_VERSION +[0-9]+")
  string(REGEX MATCH "[0-9]+" ours "${line}")
  if(NOT theirs EQUAL ours)
    message(FATAL_ERROR
      "mlx.core uses nanobind internals v${theirs}, nanobind ${nanobind_version} "
      "has v${ours}: mx.array would not pass between them. Install the nanobind "
      "that this mlx was built with.")
  endif()
  message(STATUS "nanobind internals v${ours} on both sides")
endfunction()
