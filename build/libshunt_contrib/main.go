// Command libshunt_contrib is libshunt_contrib.so, the plugin that Envoy's
// golang HTTP filter loads.
package main

import "github.com/shuntproxy/shunt/filter/golang"

// The SDK has no other place to register a filter: Envoy never calls main of a
// shared object.
func init() { golang.Register() }

func main() {}
