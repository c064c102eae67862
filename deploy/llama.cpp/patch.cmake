# Applies the patches of this folder to llama.cpp when it is configured: CMake includes this file for the project
# "llama.cpp" if it is named by CMAKE_PROJECT_llama.cpp_INCLUDE. The Makefile and cpu.Dockerfile do so; by hand:
#
#   CMAKE_ARGS="-DCMAKE_PROJECT_llama.cpp_INCLUDE=$PWD/deploy/llama.cpp/patch.cmake" pip install --no-cache-dir llama-cpp-python
#
# A worker runs on an unpatched llama.cpp as well; docs/engines.md says what the patches are for.
find_program(HEADRACE_PATCH patch)
if(NOT HEADRACE_PATCH)
  message(WARNING "llama.cpp is built without headrace's patches: there is no patch (Debian: apt-get install patch)")
  return()
endif()

file(GLOB patches "${CMAKE_CURRENT_LIST_DIR}/*.patch")
foreach(file IN LISTS patches)
  # A tree that is configured again has it.
  execute_process(COMMAND ${HEADRACE_PATCH} -p1 --reverse --force --dry-run -i ${file}
    WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} RESULT_VARIABLE missing OUTPUT_QUIET ERROR_QUIET)
  if(missing)
    execute_process(COMMAND ${HEADRACE_PATCH} -p1 --forward -i ${file}
      WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} RESULT_VARIABLE failed)
    if(failed)
      message(FATAL_ERROR "${file} does not fit this release of llama.cpp")
    endif()
  endif()
endforeach()
