package flowcontrol

type evictions struct{ total uint64 }
