// Command libshunt is libshunt.so, the module that a stock Envoy loads.
package main

import _ "github.com/shuntproxy/shunt/filter/dynmod" // exports the hooks of Envoy's dynamic module ABI

func main() {}
