package openai

import "strconv"

// modelOwner is who owns the models of a list, as OpenAI's shape wants it.
const modelOwner = "shunt"

// AppendModels appends the JSON body of an answer to GET /v1/models. created is a time in seconds, for all.
func AppendModels(dst []byte, names []string, created int64) []byte {
	dst = append(dst, `{"object":"list","data":[`...)
	for i, name := range names {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = AppendModel(dst, name, created)
	}
	return append(dst, "]}"...)
}

// AppendModel appends the JSON object of one model.
func AppendModel(dst []byte, name string, created int64) []byte {
	dst = append(dst, `{"id":`...)
	dst = AppendString(dst, name)
	dst = append(dst, `,"object":"model","created":`...)
	dst = strconv.AppendInt(dst, created, 10)
	return append(dst, `,"owned_by":"`+modelOwner+`"}`...)
}
