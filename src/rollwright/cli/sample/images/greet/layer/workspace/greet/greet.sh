#!/bin/sh
# Greets whoever is named, and the world when nobody is.
name=$1
echo "Hello, $name!"
