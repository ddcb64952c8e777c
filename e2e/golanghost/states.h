// The tables of contrib's filter: what a Go test compares with
// processor_state.h, and which status each phase accepts.
#ifndef GOLANGHOST_STATES_H
#define GOLANGHOST_STATES_H

// In the order of enum class FilterState; Go reads the numbers.
#define FILTER_STATES(X)                                                                                               \
  X(WaitingHeader)                                                                                                     \
  X(ProcessingHeader)                                                                                                  \
  X(WaitingData)                                                                                                       \
  X(WaitingAllData)                                                                                                    \
  X(ProcessingData)                                                                                                    \
  X(WaitingTrailer)                                                                                                    \
  X(ProcessingTrailer)                                                                                                 \
  X(Done)

// In the order of enum class GolangStatus.
#define GOLANG_STATUSES(X)                                                                                             \
  X(Running)                                                                                                           \
  X(LocalReply)                                                                                                        \
  X(Continue)                                                                                                          \
  X(StopAndBuffer)                                                                                                     \
  X(StopAndBufferWatermark)                                                                                            \
  X(StopNoBuffer)

#define AS_STATE(name) State##name,
#define AS_STATUS(name) Status##name,
enum filter_state { FILTER_STATES(AS_STATE) FilterStates };
enum golang_status { GOLANG_STATUSES(AS_STATUS) GolangStatuses };

// What a plugin may answer, by the state in which it was called. Each other
// answer only makes contrib log "unexpected status", and the stream hangs.
#define BIT(status) (1u << Status##status)
static const unsigned accepted[FilterStates] = {
    [StateProcessingHeader] =
        BIT(Running) | BIT(LocalReply) | BIT(Continue) | BIT(StopAndBuffer) | BIT(StopAndBufferWatermark),
    [StateProcessingData] = BIT(Running) | BIT(LocalReply) | BIT(Continue) | BIT(StopAndBuffer) |
                            BIT(StopAndBufferWatermark) | BIT(StopNoBuffer),
    [StateProcessingTrailer] = BIT(Running) | BIT(LocalReply) | BIT(Continue),
};

#endif
