# SPDX-License-Identifier: Apache-2.0
# `cmake --build DIR --target docs`: the reference, in DIR/docs. Doxygen's warnings are errors.
find_package(Doxygen 1.9.4 REQUIRED)
configure_file(docs/Doxyfile.in ${PROJECT_BINARY_DIR}/Doxyfile @ONLY)
add_custom_target(docs COMMAND Doxygen::doxygen ${PROJECT_BINARY_DIR}/Doxyfile VERBATIM)
