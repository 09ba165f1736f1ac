# SPDX-License-Identifier: Apache-2.0
# Headers and package configuration. The package holds no path of this machine, so the prefix can be moved.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir ${CMAKE_INSTALL_DATADIR}/cmake/shardopt)
install(DIRECTORY include/shardopt DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/shardopt)
install(FILES cmake/FindNCCL.cmake cmake/FindxxHash.cmake cmake/shardopt_find.cmake cmake/find_cuda_toolkit.cmake DESTINATION ${package_dir})

# One export a component: a user without CUDA never reads what names it.
foreach(component IN ITEMS host cuda nccl checkpoint)
  if(component STREQUAL "host")
    set(target shardopt)
  else()
    set(target shardopt_${component})
  endif()
  install(TARGETS ${target} EXPORT shardopt-${component} INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT shardopt-${component} NAMESPACE shardopt:: FILE shardopt-${component}.cmake DESTINATION ${package_dir})
endforeach()

configure_package_config_file(cmake/shardopt-config.cmake.in ${PROJECT_BINARY_DIR}/package/shardopt-config.cmake
                              INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/shardopt-config-version.cmake
                                 COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES ${PROJECT_BINARY_DIR}/package/shardopt-config.cmake ${PROJECT_BINARY_DIR}/package/shardopt-config-version.cmake
        DESTINATION ${package_dir})
