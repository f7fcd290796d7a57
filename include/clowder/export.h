// CLOWDER_API marks what a shared library of Clowder exports; all else in it is hidden.
#pragma once

#define CLOWDER_API __attribute__((visibility("default")))
