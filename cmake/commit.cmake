cmake_minimum_required(VERSION 3.25)
# Writes OUT, a header with the commit of SOURCE, and only where it differs: cmake -DSOURCE=... -DCOMMIT=... -DOUT=... -P
# COMMIT, where it is given, is taken for it: an image is built without the repository.
set(_commit "${COMMIT}")
if(NOT _commit)
  execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 "--exclude=*"
    OUTPUT_VARIABLE _commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT _commit)
  set(_commit unknown)
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#define EPIKV_COMMIT \"@_commit@\"\n" @ONLY)
