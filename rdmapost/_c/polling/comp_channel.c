/* The events of completion channels (ibv_get_cq_event(3)). */
#include "handles/exceptions.h"
#include "parts.h"

/*
 * get_cq_event(channel, cqs): take an event off a non-blocking completion channel, acknowledge it,
 * and add the address of the event's CQ struct to the dict as a key. Returns True, or None if there
 * was no event. One call does all of this, because ibv_destroy_cq(3) would wait forever for an
 * event that an interrupt left unacknowledged.
 */
PyObject *rp_get_cq_event(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	void *channel, *context;
	PyObject *address;
	struct ibv_cq *cq;
	int failed = 1;

	(void)self;
	channel = nargs == 2 ? PyLong_AsVoidPtr(args[0]) : NULL;
	if (!channel) {
		PyErr_SetString(PyExc_TypeError, "wrong arguments");
		return NULL;
	}
	if (ibv_get_cq_event(channel, &cq, &context)) {
		if (errno == EAGAIN)
			Py_RETURN_NONE;
		return rp_raise_verbs("ibv_get_cq_event", errno);
	}
	ibv_ack_cq_events(cq, 1);
	/* Retry: the event must not be lost, and a shortage of memory may be brief. */
	for (int i = 0; failed && i < MAX_INTERRUPTS; i++) {
		PyErr_Clear();
		address = PyLong_FromVoidPtr(cq);
		failed = !address || PyDict_SetItem(args[1], address, Py_None);
		Py_XDECREF(address);
	}
	return failed ? NULL : Py_NewRef(Py_True);
}
