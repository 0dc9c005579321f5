/* The caller's buffers for completions: rows of struct ibv_wc (WC_DTYPE). */
#include "polling/wc.h"

#include "handles/exceptions.h"
#include "handles/thread.h"

PyObject *rp_check_rows;

/* The buffer format of numpy arrays of WC_DTYPE. */
static const char WC_FORMAT[] =
	"T{L:wr_id:I:status:I:opcode:I:vendor_err:I:byte_len:I:imm_data:I:qp_num:I:src_qp:"
	"I:wc_flags:H:pkey_index:H:slid:B:sl:B:dlid_path_bits:}";

/*
 * The buffer could not be exported: replace the exporter's TypeError, ValueError or BufferError
 * with a TypeError or ValueError that names the argument. Leave other exceptions as they are.
 */
static void refuse_rows(PyObject *buffer)
{
	PyObject *raised, *name;
	Py_buffer view;

	if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError) &&
	    !PyErr_ExceptionMatches(PyExc_BufferError))
		return;
	raised = rp_take_exception();
	name = PyType_GetName(Py_TYPE(buffer));
	if (!PyObject_CheckBuffer(buffer)) {
		PyErr_Format(PyExc_TypeError, "buffer: expected a writable buffer, got %V", name, "?");
	} else if (PyObject_GetBuffer(buffer, &view, PyBUF_FULL_RO)) {
		PyErr_Format(PyExc_ValueError, "buffer: %S", raised);
	} else {
		if (view.readonly)
			PyErr_Format(PyExc_TypeError, "buffer: expected a writable buffer, got %V, "
				     "which is read-only", name, "?");
		else
			PyErr_Format(PyExc_ValueError, "buffer: expected a contiguous buffer, got "
				     "%V, which is not contiguous", name, "?");
		PyBuffer_Release(&view);
	}
	Py_XDECREF(name);
	Py_DECREF(raised);
}

/* Export a buffer; 0, or -1 with an exception that names the argument. */
static int export_rows(PyObject *buffer, Py_buffer *view)
{
	int failed;

	if (rp_enter_call())
		return -1;
	failed = PyObject_GetBuffer(buffer, view, PyBUF_CONTIG | PyBUF_FORMAT);
	if (failed)
		refuse_rows(buffer);
	rp_leave_call();
	return failed;
}

/*
 * Take a single memoryview, then check and export it: a class may return a different buffer each
 * time it is asked.
 */
static int export_checked(PyObject *buffer, Py_buffer *view)
{
	PyObject *memory = PyMemoryView_FromObject(buffer);
	PyObject *checked =
		memory ? PyObject_CallFunctionObjArgs(rp_check_rows, memory, NULL) : NULL;
	int failed = !checked || export_rows(memory, view);

	Py_XDECREF(checked);
	Py_XDECREF(memory);
	return failed ? -1 : 0;
}

/*
 * Whether a buffer's rows are of WC_DTYPE. The size counts, too: longer rows may have fields that
 * the format omits.
 */
static int is_of_wcs(const Py_buffer *view)
{
	return view->itemsize == sizeof(struct ibv_wc) && view->format &&
	       !strcmp(view->format, WC_FORMAT);
}

int rp_get_rows(PyObject *buffer, Py_buffer *view)
{
	static char nowhere[1];

	if (export_rows(buffer, view))
		return -1;
	if (!PyByteArray_CheckExact(buffer) && !is_of_wcs(view)) {
		PyBuffer_Release(view);
		if (export_checked(buffer, view))
			return -1;
	}
	/* An empty buffer's address may be NULL, but callers take NULL to mean WCs instead of rows. */
	if (!view->buf)
		view->buf = nowhere;
	if (view->len % (Py_ssize_t)sizeof(struct ibv_wc) == 0)
		return 0;
	PyBuffer_Release(view);
	PyErr_SetString(PyExc_ValueError, "the buffer does not hold whole rows of 48 bytes");
	return -1;
}
